"""What the commands share: where text goes, exit codes, which errors are the user's."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from samplex_cuda.data.cache import SourceChangedError
from samplex_cuda.data.lines import BadLineError
from samplex_cuda.training import CheckpointError, Config, ConfigError, NonFiniteLossError, RunError
from samplex_cuda.training.ranks import RanksError, launched
from samplex_cuda.training.safe_files import sync_directory

__all__ = [
    "INTERRUPTED",
    "NOT_FINITE",
    "OK",
    "PROBLEM",
    "Output",
    "Stop",
    "UserError",
    "beside",
    "check_device",
    "check_writable",
    "checked",
    "plain",
    "read_config",
    "resume_command",
    "run",
]

OK, PROBLEM, USAGE, NOT_FINITE, INTERRUPTED = 0, 1, 2, 3, 130


class UserError(Exception):
    """Something that the user can put right; the message says how.

    Example:
        >>> from samplex_cuda.cli.common import UserError
        >>> str(UserError("predict: rows.npy: there is no such file"))
        'predict: rows.npy: there is no such file'
    """


class Stop(Exception):  # noqa: N818  (an end, not an error)
    """Ends a command early with its JSON object and exit code.

    Example:
        >>> from samplex_cuda.cli.common import Stop
        >>> Stop({"status": "interrupted"}, 130).code
        130
    """

    def __init__(self, payload: dict[str, Any], code: int) -> None:
        super().__init__(code)
        self.payload, self.code = payload, code


# What torch says, in a RuntimeError.
_NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed", "integer multiplication overflow",
              "larger than max")  # fmt: skip

_USERS = (UserError, BadLineError, CheckpointError, ConfigError, RunError, SourceChangedError, OSError)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Where arguments, configurations and files of the user are read: a value that is refused there is the user's.

    Example:
        >>> from samplex_cuda.cli.common import UserError, checked
        >>> try:
        ...     with checked():
        ...         raise ValueError("open: x.foo: format must be given")
        ... except UserError as error:
        ...     print(error)
        open: x.foo: format must be given
    """
    try:
        yield
    except (NonFiniteLossError, *_USERS):
        raise
    except (ValueError, TypeError, IndexError, ImportError) as error:
        raise UserError(str(error)) from error


def check_device(name: str) -> str:
    """The name of a device that torch can use here; UserError otherwise.

    Example:
        >>> from samplex_cuda.cli.common import check_device
        >>> check_device("cpu")
        'cpu'
    """
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UserError(f"the device must be cpu or cuda, got {name!r}")
    count = torch.cuda.device_count()
    if kind == "cuda" and (torch.device(name).index or 0) >= count:
        raise UserError(f"the device must be cpu or one of the {count} CUDA devices of this machine, got {name!r}")
    return name


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
    )


def _is_users(error: BaseException) -> bool:
    if isinstance(error, _USERS) or _is_memory(error):
        return True
    if isinstance(error, ImportError):
        return "pip install" in str(error)
    # How this library refuses an argument: "op: name must be ..., got ...".
    return isinstance(error, ValueError | IndexError) and "must be" in str(error) and ", got " in str(error)


def _say_error(error: BaseException) -> str:
    if _is_memory(error):
        return (
            f"there is not enough memory ({str(error).splitlines()[0]}); a model has model.dim numbers for each class, "
            "and for each feature of sparse data"
        )
    if isinstance(error, OSError) and error.strerror and ":" not in str(error.args[-1]):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return str(error)


def plain(value: Any) -> Any:
    """A value as JSON takes it: nan and infinities become null, paths text.

    Example:
        >>> from samplex_cuda.cli.common import plain
        >>> plain({"nll": float("nan"), "k": (1, 2)})
        {'nll': None, 'k': [1, 2]}
    """
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | bool) or value is None:
        return value
    return str(value)


class Output:
    """Where a command writes: text to stdout; with `--json`, text to stderr and one object to stdout.

    Example:
        >>> from samplex_cuda.cli.common import Output
        >>> Output(as_json=False).say("hello")
        hello
    """

    def __init__(self, as_json: bool, quiet: bool = False) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json, highlight=False, quiet=quiet)
        self.live = self.console.is_terminal
        self.warnings: list[str] = []

    def say(self, text: str = "") -> None:
        """A line of text, as it is."""
        self.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line that begins with "warning:"; in the JSON object too."""
        if text not in self.warnings:
            self.warnings.append(text)
            self.console.print(f"warning: {text}", markup=False, soft_wrap=True, style="yellow")

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Names and values, one a row."""
        found = Table(show_header=False)
        found.add_column()
        found.add_column(overflow="fold")
        for name, value in rows:
            found.add_row(name, _no_markup(value))
        self.console.print(found)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """A spinner while something takes long; a line where there is no terminal."""
        if self.live:
            with self.console.status(text):
                yield
        else:
            self.say(text)
            yield


def _no_markup(text: str) -> str:
    return text.replace("[", "\\[")


def run(name: str, as_json: bool, body: Callable[[Output], tuple[dict[str, Any], int]]) -> None:
    """Runs the body of a command and ends with its exit code; errors of the user become a message.

    With SAMPLEX_DEBUG=1 they keep their traceback.

    Example:
        >>> import typer
        >>> from samplex_cuda.cli.common import run
        >>> try:
        ...     run("info", True, lambda out: ({"classes": 5}, 0))
        ... except typer.Exit as end:
        ...     print(end.exit_code)
        {"command": "info", "classes": 5, "exit_code": 0}
        0
    """
    other = launched()[0] > 0  # one rank of torchrun speaks for all
    out = Output(as_json, quiet=other)
    payload: dict[str, Any] = {}

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        out.warn(str(message))

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show  # type: ignore[assignment]
            payload, code = body(out)
    except Stop as end:
        payload, code = end.payload, end.code
    except KeyboardInterrupt:
        code, payload = INTERRUPTED, {"status": "interrupted", "error": "interrupted"}
        out.say("Interrupted.")
    except NonFiniteLossError as error:
        code, payload = NOT_FINITE, {"status": "nan", "error": str(error)}
        out.console.print(str(error), markup=False, soft_wrap=True, style="red")
    except Exception as error:
        if not _is_users(error) or os.environ.get("SAMPLEX_DEBUG"):
            raise
        code, payload = PROBLEM, {"status": "error", "error": _say_error(error)}
        Console(stderr=True, highlight=False, quiet=other and isinstance(error, RanksError)).print(
            f"samplex {name}: {payload['error']}", markup=False, soft_wrap=True, style="red"
        )
    if as_json and not other:
        answer: dict[str, Any] = {"command": name, **payload, "exit_code": code}
        if out.warnings:
            answer["warnings"] = out.warnings
        sys.stdout.write(json.dumps(plain(answer)) + "\n")
        sys.stdout.flush()
    raise typer.Exit(code)


def resume_command(run_dir: Path | str, trust_model: str | None = None) -> str:
    """What to type to continue with a run, whose model was trusted where it has an import path.

    Example:
        >>> from samplex_cuda.cli.common import resume_command
        >>> resume_command("runs/my run")
        "samplex train --resume 'runs/my run'"
    """
    trust = f" --trust-model {shlex.quote(trust_model)}" if trust_model else ""
    return f"samplex train --resume {shlex.quote(str(run_dir))}{trust}"


def read_config(run_dir: Path) -> Config:
    """The configuration of a run folder.

    Example:
        >>> from pathlib import Path
        >>> from samplex_cuda.cli.common import read_config
        >>> read_config(Path("runs/mine"))  # doctest: +SKIP
    """
    from samplex_cuda.training import config as configs

    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such run folder")
    if not (run_dir / "config.toml").is_file():
        raise UserError(f"{run_dir}: has no config.toml, so it is not a run folder of samplex train")
    return configs.load(run_dir / "config.toml", of_run=True)


def check_writable(path: Path) -> None:
    """UserError where a file cannot be put there: said before the work, not after it.

    Example:
        >>> from pathlib import Path
        >>> from samplex_cuda.cli.common import UserError, check_writable
        >>> try:
        ...     check_writable(Path("no/such/top.npy"))
        ... except UserError as error:
        ...     print(error)
        no/such/top.npy: there is no folder no/such
    """
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"{path}: is a folder, not a file")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path}: the folder {path.parent} cannot be written to")


def beside(path: Path, write: Callable[[Path], None]) -> None:
    """Puts a file in place as a whole: `write` fills a temporary file beside it, which is synced and renamed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from samplex_cuda.cli.common import beside
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     beside(Path(folder, "a.txt"), lambda new: print(new.write_text("whole")))
        ...     Path(folder, "a.txt").read_text()
        5
        'whole'
    """
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    temporary.unlink(missing_ok=True)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
