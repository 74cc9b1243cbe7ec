"""Altered files into every reader: data files, configurations, tensors, checkpoints.

    python tests/fuzz/fuzz_files.py --seconds 60
    python tests/fuzz/fuzz_files.py --only FILE      one saved input

A reader may read an altered file or raise one of its documented exceptions. Anything else is a finding: another
exception, a crash, more than ten seconds, more than 4 GB. If atheris is installed the search is guided by coverage of
`samplex_cuda.data` and `samplex_cuda.training`; otherwise valid files are altered at random.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MEMORY = 4 << 30  # bytes
HANG = 10  # seconds
_INTERESTING = (
    b"\0",
    b"\xff",
    b"-1",
    b"9" * 25,
    b"nan",
    b"inf",
    b"1e400",
    b"\n",
    b"\r\n",
    b",",
    b":",
    b"{",
    b"[" * 300,
)


def _npy(array: Any) -> bytes:
    import numpy as np

    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _npz(**arrays: Any) -> bytes:
    import numpy as np

    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _safetensors(folder: Path) -> bytes:
    import torch

    from samplex_cuda.training.checkpoint import write_tensors

    write_tensors(folder / "t", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.int64)})
    return (folder / "t").read_bytes()


def _checkpoint(folder: Path) -> dict[str, bytes]:
    import torch

    from samplex_cuda.training import checkpoint

    path = checkpoint.save(folder / "checkpoint-00000001", {"w": torch.zeros(2, 2)}, {"step": 1, "config": {}})
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


class Targets:
    """The readers, with valid files to start from."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        from samplex_cuda import data
        from samplex_cuda.training import checkpoint
        from samplex_cuda.training.config import files as config

        self.folder = folder
        x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 2, 1])
        csr = {
            "indptr": np.array([0, 1, 2, 3]),
            "indices": np.array([0, 2, 1]),
            "data": np.ones(3, np.float32),
            "shape": np.array([3, 4]),
            "format": np.array(b"csr"),
            "y": np.array([0, 1, 0]),
        }
        self._parts = _checkpoint(folder)
        self._checkpoint_dir = folder / "checkpoint-00000001"

        def read(name: str, **options: Any) -> Callable[[bytes], Any]:
            def run(content: bytes) -> Any:
                path = folder / name
                path.write_bytes(content)
                cache = folder / "cache"
                try:
                    found = data.open(path, cache_dir=cache, **options) if "npy" not in name else data.open(path)
                    return len(found)
                finally:
                    shutil.rmtree(cache, ignore_errors=True)

            return run

        def arrays(name: str, other: tuple[str, bytes] | None = None) -> Callable[[bytes], Any]:
            def run(content: bytes) -> Any:
                (folder / name).write_bytes(content)
                if other is not None:
                    (folder / other[0]).write_bytes(other[1])
                return len(data.open(folder / name))

            return run

        def labels(content: bytes) -> Any:
            (folder / "x.npy").write_bytes(_npy(x))
            (folder / "y.npy").write_bytes(content)
            return len(data.open(folder / "x.npy"))

        def part(name: str) -> Callable[[bytes], Any]:
            def run(content: bytes) -> Any:
                for other, kept in self._parts.items():
                    (self._checkpoint_dir / other).write_bytes(content if other == name else kept)
                checkpoint.load(self._checkpoint_dir, check=False)
                checkpoint.verify(self._checkpoint_dir)

            return run

        def tensors(content: bytes) -> Any:
            (folder / "tensors.safetensors").write_bytes(content)
            return checkpoint.read_tensors(folder / "tensors.safetensors")

        def toml(content: bytes) -> Any:
            (folder / "config.toml").write_bytes(content)
            return config.load(folder / "config.toml")

        documented: tuple[type[BaseException], ...] = (ValueError, OSError)
        damaged: tuple[type[BaseException], ...] = (checkpoint.CheckpointError,)
        ratings = b"user,item,rating,timestamp\n1,10,4.0,100\n1,11,5.0,101\n2,10,1.0,102\n2,12,2.5,103\n"
        # name: (reader, a valid file, documented exceptions)
        self.all: dict[str, tuple[Callable[[bytes], Any], bytes, tuple[type[BaseException], ...]]] = {
            "xc": (read("a.xc", format="xc"), b"4 6 9\n3,8 0:0.5 5:1\n 1:2 2:-3.5e-1\n7\n0 3:4 \n", documented),
            "svmlight": (read("a.svm", format="svmlight"), b"1 1:0.5 3:2 # c\n2,3 2:1\n0 1:1e-3\n", documented),
            "text": (read("a.txt", format="text"), b"the cat sat\non the mat\n\nthe end \xc3\xa9\n" * 40, documented),
            "interactions": (read("a.csv", format="interactions"), ratings, documented),
            "ratings": (read("a.tsv", format="interactions"), ratings.replace(b",", b"\t"), documented),
            "sequences": (read("a.seq", format="sequences"), b"1 2 3 4\n5 6 7\n1 9\n", documented),
            "npy": (arrays("x.npy", ("y.npy", _npy(y))), _npy(x), documented),
            "npy labels": (labels, _npy(y), documented),
            "npz": (arrays("a.npz"), _npz(x=x, y=y), documented),
            "csr": (arrays("csr.npz"), _npz(**csr), documented),
            "tensors": (tensors, _safetensors(folder), damaged),
            "config": (toml, b'[data]\npath = "builtin"\nvalid_fraction = 0.1\n', documented),
        }  # fmt: skip
        for name, content in self._parts.items():
            self.all[f"checkpoint {name}"] = (part(name), content, damaged)
        self.names = list(self.all)

    def seeds(self) -> Iterator[tuple[str, bytes]]:
        """Valid files by name of their reader."""
        for name, (_, content, _) in self.all.items():
            yield name, content

    def __call__(self, name: str, content: bytes) -> tuple[str, str] | None:
        """None, or (a short key, the traceback) of a finding."""
        reader, _, documented = self.all[name]
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(HANG)
        try:
            reader(content)
        except documented as error:
            # A subclass of ValueError from a library below has no word about the file.
            if isinstance(error, UnicodeError | json.JSONDecodeError):
                return _described(name, error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return _described(name, error)
        finally:
            signal.alarm(0)
        return None


class TooLongError(BaseException):
    """A reader took longer than HANG."""


def _too_long(*_: Any) -> None:
    raise TooLongError(f"no answer in {HANG} s")


def _described(name: str, error: BaseException) -> tuple[str, str]:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "samplex_cuda" in f.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    return f"{name}: {type(error).__name__} in {place}", "".join(traceback.format_exception(error))


def alter(content: bytes, r: random.Random) -> bytes:
    """Some bytes changed, cut, repeated, swapped or inserted."""
    made = bytearray(content)
    for _ in range(r.choice((1, 1, 1, 2, 4, 16))):
        at = r.randrange(len(made) + 1)
        kind = r.randrange(7)
        if kind == 0 and made:
            made[min(at, len(made) - 1)] = r.randrange(256)
        elif kind == 1:
            made[at:at] = r.choice(_INTERESTING)
        elif kind == 2:
            del made[at : at + r.choice((1, 2, 8, 64))]
        elif kind == 3:
            made[at:at] = made[at : at + r.choice((1, 4, 32))] * r.choice((1, 2, 20))
        elif kind == 4:
            del made[at:]
        elif kind == 5 and made:
            made[min(at, len(made) - 1)] ^= 1 << r.randrange(8)
        else:
            digits = [i for i, byte in enumerate(made) if 48 <= byte < 58]
            if digits:
                i = r.choice(digits)
                made[i : i + 1] = r.choice((b"0", b"-1", b"9" * 19, b"1152921504606846976", b"4294967296", b"1e9"))
    return bytes(made)


class Findings:
    """Keeps the first input of each kind of finding in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self._seen: set[str] = set()

    def add(self, key: str, text: str, name: str, content: bytes) -> None:
        """Print a new kind once; every input is counted."""
        self.count += 1
        if key in self._seen:
            return
        self._seen.add(key)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{len(self._seen):03d}-{key.replace(' ', '_').replace('/', '_').replace(':', '')}"
        path.write_bytes(name.encode() + b"\n" + content)
        print(f"\n{key}\n{text.strip().splitlines()[-1]}\n  python tests/fuzz/fuzz_files.py --only {path}", flush=True)


def _limit() -> None:
    """Memory; and no messages of the readers, thousands of which would hide the findings."""
    warnings.simplefilter("ignore")
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY + (8 << 30), MEMORY + (8 << 30)))  # torch maps a few GB itself


def search(seconds: float, seed: int, folder: Path, current: Path) -> int:
    """Random search; exit status 1 where something was found."""
    with tempfile.TemporaryDirectory() as work:
        targets, found = Targets(Path(work)), Findings(folder)
        _limit()
        r, end, calls = random.Random(seed), time.monotonic() + seconds, 0
        pool = {name: [content] for name, content in targets.seeds()}
        for name, content in targets.seeds():
            if (problem := targets(name, content)) is not None:
                found.add(*problem, name, content)
        while time.monotonic() < end:
            name = r.choice(targets.names)
            content = alter(r.choice(pool[name]), r)
            current.write_bytes(name.encode() + b"\n" + content)
            calls += 1
            problem = targets(name, content)
            if problem is not None:
                found.add(*problem, name, content)
            elif r.random() < 0.02 and len(pool[name]) < 200 and len(content) < 5000:
                pool[name].append(content)
        print(f"{calls} files, {found.count} findings")
        return 1 if found.count else 0


def guided(seconds: float, folder: Path, current: Path) -> int:
    """Search guided by coverage, with atheris."""
    import atheris

    with atheris.instrument_imports(include=["samplex_cuda.data", "samplex_cuda.training"]):
        import samplex_cuda.data
        import samplex_cuda.training  # noqa: F401
    work = Path(tempfile.mkdtemp())
    targets, found = Targets(work), Findings(folder)
    corpus = work / "corpus"
    corpus.mkdir()
    for i, (_, content) in enumerate(targets.seeds()):
        (corpus / f"{i}").write_bytes(bytes([i]) + content)
    _limit()

    def one(content: bytes) -> None:
        name = targets.names[content[0] % len(targets.names)] if content else targets.names[0]
        current.write_bytes(name.encode() + b"\n" + content[1:])
        problem = targets(name, content[1:])
        if problem is not None:
            found.add(*problem, name, content[1:])
            (folder / "count").write_text(str(found.count))

    atheris.Setup([sys.argv[0], f"-max_total_time={int(seconds)}", "-max_len=4096", "-verbosity=0", str(corpus)], one)
    atheris.Fuzz()
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=Path, help="a saved input")
    parser.add_argument("--random", action="store_true", help="without atheris, even if it is installed")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz-files"), help="where inputs are saved")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        name, _, content = args.only.read_bytes().partition(b"\n")
        with tempfile.TemporaryDirectory() as work:
            problem = Targets(Path(work))(name.decode(), content)
        print("ok" if problem is None else problem[1])
        return 0 if problem is None else 1
    if args.child:
        if importlib.util.find_spec("atheris") and not args.random:
            return guided(args.seconds, args.folder, args.child)
        return search(args.seconds, args.seed, args.folder, args.child)
    # A crash ends the child, not the search: the input is kept and the next child has another seed.
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    print(f"{'coverage-guided' if importlib.util.find_spec('atheris') and not args.random else 'random'} search")
    status, seed, end = 0, args.seed, time.monotonic() + args.seconds
    while (left := end - time.monotonic()) > 1:
        current = args.folder / "current"
        command = [sys.executable, __file__, "--child", str(current), "--seconds", str(left), "--seed", str(seed)]
        command += ["--folder", str(args.folder), *(["--random"] if args.random else [])]
        code = subprocess.run(command, check=False).returncode
        if code not in (0, 1):
            kept = args.folder / f"crash-{seed}"
            shutil.copy(current, kept)
            print(f"\ncrash: the reader ended with status {code}\n  python tests/fuzz/fuzz_files.py --only {kept}")
        status, seed = status or int(code != 0), seed + 1
    with contextlib.suppress(FileNotFoundError):
        status = status or int((args.folder / "count").read_text() != "0")
    return status


if __name__ == "__main__":
    sys.exit(main())
