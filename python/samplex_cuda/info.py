"""What was built and what runs here: `python -m samplex_cuda.info [--json]`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from samplex_cuda._driver import driver_cuda, driver_version, is_older, kernels_for, needed_driver
from samplex_cuda._library import _native

__all__ = ["format_info", "gather_info", "main"]

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _huge_pages(setting: Path = _HUGE_PAGES) -> str:
    """The kernel's transparent huge page mode: 'always', 'madvise', 'never', or 'unknown' where it cannot be read."""
    try:
        text = setting.read_text()
    except OSError:
        return "unknown"
    chosen = [word.strip("[]") for word in text.split() if word.startswith("[")]
    return chosen[0] if chosen else "unknown"


def _devices(archs: list[str]) -> list[dict[str, Any]]:
    """The CUDA devices torch sees: name, compute capability ('8.0'), memory in bytes, what they run of this build."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        kernels, arch = kernels_for(capability, archs)
        found.append(
            {
                "name": properties.name,
                "capability": capability,
                "memory": int(properties.total_memory),
                "kernels": kernels,
                "kernels_arch": arch,
            }
        )
    return found


def gather_info() -> dict[str, Any]:
    """What was built (`build`), what this process uses (`runtime`) and what the machine has (`machine`).

    Example:
        >>> from samplex_cuda.info import gather_info
        >>> info = gather_info()
        >>> info["build"]["version"], info["runtime"]["simd_level"] in ("scalar", "avx2", "avx512")
        ('0.2.0', True)
    """
    native = dict(_native.build_info())
    build_keys = ("version", "commit", "compiler", "build_type", "cuda", "sanitizers", "test_backends")
    build = {key: native[key] for key in build_keys}
    build["cuda_version"] = native["cuda_version"] or None
    build["cuda_archs"] = [arch for arch in native["cuda_archs"].split(",") if arch]
    build["needed_driver"] = needed_driver(build["cuda_version"])
    build["location"] = str(Path(_native.__file__).parent)
    runtime = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "simd_level": native["simd_level"],
        "cpu_backend": native["cpu_backend"],
        "ops": sorted({name.split("::")[1].split(".")[0] for name in _op_names()}),
    }
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "simd_detected": native["simd_detected"],
        "huge_pages": _huge_pages(),
        "driver": driver_version(),
        "driver_cuda": driver_cuda(),
        "cuda_devices": _devices(build["cuda_archs"]),
    }
    return {"build": build, "runtime": runtime, "machine": machine}


def _op_names() -> list[str]:
    """Qualified names of the registered ops: 'samplex::sampled_softmax', …"""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return [name for name in names if name.startswith("samplex::")]


def _cuda_status(info: dict[str, Any]) -> str:
    """One sentence: do CUDA tensors work here, and if not, why and what to do."""
    build, machine = info["build"], info["machine"]
    if not build["cuda"]:
        return "no: built without CUDA kernels (put nvcc on PATH and rebuild)"
    if info["runtime"]["torch_cuda"] is None:
        return "no: this torch is a CPU build (install a CUDA build of torch >= 2.13)"
    if is_older(machine["driver"], build["needed_driver"]):
        return (
            f"no: driver {machine['driver']} is too old for kernels of CUDA {build['cuda_version']} "
            f"(install driver {build['needed_driver']} or newer, or rebuild with an older CUDA toolkit)"
        )
    if not machine["cuda_devices"]:
        why = " and there is no NVIDIA driver" if machine["driver"] is None else ""
        return f"no: torch sees no CUDA device{why}"
    if all(device["kernels"] == "none" for device in machine["cuda_devices"]):
        return "no: no kernel of this build runs on the devices here (rebuild here with `make build`)"
    return "yes"


def _driver_text(info: dict[str, Any]) -> str:
    """The driver that is here, and the one the kernels need."""
    build, machine = info["build"], info["machine"]
    here = machine["driver"] or "none found"
    if machine["driver"] and machine["driver_cuda"]:
        here += f" (CUDA {machine['driver_cuda']})"
    needed = build["needed_driver"]
    return here if needed is None else f"{here}; CUDA {build['cuda_version']} needs R{needed} or newer"


def _kernels_text(device: dict[str, Any], info: dict[str, Any]) -> str:
    """What one device runs of this build, and what to do where that is not machine code."""
    if device["kernels"] == "machine code":
        return f"machine code for {device['kernels_arch']}"
    if device["kernels"] == "PTX":
        text = (
            f"PTX of {device['kernels_arch']}, which the driver compiles at first use; `make build` makes machine code"
        )
        build, cuda = info["build"], info["machine"]["driver_cuda"]
        if is_older(cuda, build["cuda_version"] and ".".join(build["cuda_version"].split(".")[:2])):
            text += f"; this driver compiles PTX up to CUDA {cuda} and cannot take that of CUDA {build['cuda_version']}"
        return text
    if device["kernels"] == "none":
        return "no kernels for this device; rebuild here with `make build`"
    return f"built for {', '.join(info['build']['cuda_archs'])}"


def format_info(info: dict[str, Any]) -> str:
    """The text that `python -m samplex_cuda.info` prints, from the dict of `gather_info`.

    Example:
        >>> from samplex_cuda.info import format_info, gather_info
        >>> print(format_info(gather_info()).splitlines()[0])
        samplex-cuda 0.2.0
    """
    build, runtime, machine = info["build"], info["runtime"], info["machine"]
    cuda = f"CUDA {build['cuda_version']} for {', '.join(build['cuda_archs'])}" if build["cuda"] else "without CUDA"
    simd = runtime["simd_level"]
    if simd != machine["simd_detected"]:
        simd += f" (this machine has {machine['simd_detected']})"
    torch_cuda = f"CUDA {runtime['torch_cuda']}" if runtime["torch_cuda"] else "CPU build"
    rows = [
        ("commit", build["commit"]),
        ("compiler", f"{build['compiler']}, {build['build_type']}"),
        ("kernels", cuda),
        ("location", build["location"]),
        ("ops", ", ".join(runtime["ops"]) or "none"),
        ("python", runtime["python"]),
        ("torch", f"{runtime['torch']} ({torch_cuda})"),
        ("threads", f"{runtime['threads']} of {machine['cores']} cores"),
        ("SIMD", simd),
        ("huge pages", machine["huge_pages"]),
        ("system", machine["system"]),
        ("CUDA here", _cuda_status(info)),
        ("driver", _driver_text(info)),
    ]
    if build["sanitizers"]:
        rows.append(("sanitizers", build["sanitizers"]))
    if build["test_backends"]:
        rows.append(("test build", f"CPU tensors served by '{runtime['cpu_backend']}'"))
    for index, device in enumerate(machine["cuda_devices"]):
        memory = device["memory"] / 2**30
        rows.append((f"cuda:{index}", f"{device['name']}, compute {device['capability']}, {memory:.1f} GiB"))
        if build["cuda"]:
            rows.append(("", _kernels_text(device, info)))
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"samplex-cuda {build['version']}", *(f"  {name:<{width}}  {value}" for name, value in rows)])


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m samplex_cuda.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    info = gather_info()
    print(json.dumps(info, indent=2) if args.json else format_info(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())
