"""The command line: `samplex`, or `python -m samplex_cuda.cli`. Needs the extra `cli`. See docs/cli.md."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code.

    Args:
        argv: the words after `samplex`; `sys.argv[1:]` by default.

    Example:
        >>> from samplex_cuda.cli import main
        >>> main(["config", "--no-comments"])  # doctest: +ELLIPSIS
        [data]
        ...
        0
    """
    for name in ("typer", "rich"):
        if importlib.util.find_spec(name) is None:
            print(f"samplex needs {name}: pip install 'samplex-cuda[cli]'", file=sys.stderr)
            return 1
    from samplex_cuda.cli.app import app

    try:
        app(args=argv, prog_name="samplex")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0
