"""Build a wheel in dist/ and check it: python scripts/make_wheel.py [--cuda AUTO|ON|OFF] [--archs LIST] [--torch SPEC]

1. Builds the wheel against the torch of this environment, with --from-sdist from an unpacked source distribution
   (which goes to dist/, too). Its build tag says what it has: `1cuda`, or `0cpu` without
   CUDA kernels, because the name alone would not tell.
2. Checks that libsamplex.so has device code (the ELF section .nv_fatbin) exactly if the tag says so.
3. Installs it into a clean environment and runs a training step there, away from the source tree. That environment
   borrows the torch of this one; with --torch (e.g. "torch==2.14.0") it gets its own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from progress import run as run_with_progress
from side_build import install, side_environment
from wheel_info import has_device_code

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TAGS = {True: "1cuda", False: "0cpu"}
USE = """
import torch
import samplex_cuda as sx
info = sx._native.build_info()
assert not info["test_backends"], "a wheel must not have the test backends"
head = sx.SampledClassifier(8, 100, sx.samplers.LogUniform(100), num_samples=5)
optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1)
h, y = torch.randn(4, 8, requires_grad=True), torch.arange(4)
loss = head(h, y, key=sx.Key(1))
loss.backward()
optimizer.step()
assert torch.isfinite(loss) and h.grad.shape == (4, 8)
assert head.eval().topk(h.detach(), 3)[1].shape == (4, 3)
print(f"torch {torch.__version__}")
print(sx.__file__)
"""


def make_sdist(folder: Path) -> Path:
    """Writes the source distribution to dist/ and unpacks it in `folder`; returns the unpacked tree."""
    DIST.mkdir(exist_ok=True)
    hook = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    build = [sys.executable, "-c", hook, str(DIST)]
    done = subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    name = done.stdout.strip().splitlines()[-1]
    with tarfile.open(DIST / name) as archive:
        archive.extractall(folder, filter="data")
    return folder / name.removesuffix(".tar.gz")


def check_contents(wheel: Path, cuda: bool) -> None:
    """Exits with a message where the wheel is not what its name says."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    strange = [name for name in names if not name.startswith(("samplex_cuda/", "samplex_cuda-"))]
    bundled = [name for name in names if "libtorch" in name or "libc10" in name or "simt" in name]
    if strange or bundled:
        raise SystemExit(f"make_wheel: {wheel.name} must have the package only, got {strange + bundled}")
    if has_device_code(wheel) != cuda:
        found = "no device code" if cuda else "device code"
        raise SystemExit(f"make_wheel: {wheel.name} must match its tag, got {found} in libsamplex.so")


def use(wheel: Path, torch: str | None) -> str:
    """Installs the wheel into a clean environment and trains a step there; returns the torch that was used."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "environment"
        if torch is None:
            python = side_environment(directory)
        else:
            subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
            python = directory / "bin" / "python"
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
            subprocess.run([*pip, torch, "numpy"], check=True)
        install(python, wheel)
        # Isolated (-I) and elsewhere: neither the tree nor PYTHONPATH may help.
        trial = [str(python), "-I", "-c", USE]
        done = subprocess.run(trial, cwd=scratch, check=True, stdout=subprocess.PIPE, text=True)
        version, place = done.stdout.strip().splitlines()[-2:]
        if not Path(place).is_relative_to(directory):
            raise SystemExit(f"make_wheel: the package must come from the wheel, got {place}")
        return version


def main() -> int:
    """Build, check, install, use."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].split(":")[0])
    parser.add_argument("--cuda", choices=["AUTO", "ON", "OFF"], default="AUTO")
    parser.add_argument("--archs", default="", help="CUDA architectures, as CMake writes them (default: all listed)")
    parser.add_argument("--torch", help="requirement of the torch to install into the clean environment")
    parser.add_argument("--from-sdist", action="store_true", help="build the wheel from a source distribution")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.from_sdist:
            print("== source distribution", flush=True)
        return build(options, make_sdist(Path(scratch)) if options.from_sdist else ROOT)


def build(options: argparse.Namespace, source: Path) -> int:
    """Builds a wheel of the tree `source` and checks it."""
    cuda = options.cuda == "ON" or (options.cuda == "AUTO" and shutil.which("nvcc") is not None)
    before = set(DIST.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-v", "wheel", str(source)]
    command += ["--no-build-isolation", "--no-deps", "--wheel-dir", str(DIST)]
    command += [f"--config-settings=wheel.build-tag={TAGS[cuda]}"]
    command += [f"--config-settings=cmake.define.SAMPLEX_CUDA={'ON' if cuda else 'OFF'}"]
    if options.archs:
        command += [f"--config-settings=cmake.define.SAMPLEX_CUDA_ARCHS={options.archs}"]
    print(f"== wheel ({'with CUDA kernels' if cuda else 'CPU only: nvcc is not on PATH, or CUDA=OFF'})", flush=True)
    status = subprocess.run(command, check=False).returncode if options.verbose else run_with_progress(command)
    if status:
        return status
    made = sorted(set(DIST.glob("*.whl")) - before) or sorted(DIST.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    wheel = made[-1]
    check_contents(wheel, cuda)
    print("== install into a clean environment", flush=True)
    version = use(wheel, options.torch)
    kernels = "CUDA kernels" if cuda else "no CUDA kernels"
    print(f"dist/{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MB, {kernels}, trains a step with {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
