"""`samplex reproduce`: the experiments of the papers, one after the other, and the page over them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from samplex_cuda.cli.common import OK, PROBLEM, Output, UserError, checked
from samplex_cuda.reproduce import NAMES, Result, load, run_paper, write_index
from samplex_cuda.reproduce.report import TOY

__all__ = ["reproduce"]


def _names(name: str) -> list[str]:
    if name != "all" and name not in NAMES:
        raise UserError(f"NAME must be one of {', '.join(NAMES)} or all, got {name!r}")
    return list(NAMES) if name == "all" else [name]


def _say(out: Output, result: Result) -> None:
    shown = Table(title=f"{result.found['title']}", title_justify="left")
    for column in ("", "the paper says", "measured here", "holds"):
        shown.add_column(column, overflow="fold")
    words = {None: "\u2013", True: "yes", False: "no"}
    for claim in result.claims:
        note = f" ({claim['note']})" if claim["note"] else ""
        cells = (claim["name"], claim["paper"], claim["measured"] + note, words[claim["holds"]])
        shown.add_row(*(cell.replace("[", "\\[") for cell in cells))
    out.console.print(shown)
    if result.found["size"] == "quick":
        out.say(TOY)
    out.say(f"{result.folder / 'report.md'} ({result.found['wall_seconds']:.0f} s)")


def reproduce(
    out: Output, name: str, *, folder: Path, full: bool, quick: bool, seed: int, data: Path | None
) -> tuple[dict[str, Any], int]:
    """Runs a paper, or all of them; one that fails does not keep the others from running.

    Example:
        >>> from pathlib import Path
        >>> from samplex_cuda.cli.common import Output, UserError
        >>> from samplex_cuda.reproduce.command import reproduce
        >>> try:
        ...     reproduce(Output(True), "x", folder=Path("runs"), full=False, quick=True, seed=0, data=None)
        ... except UserError as error:
        ...     print(error)
        NAME must be one of adversarial, kernel, rff, attention, contrastive or all, got 'x'
    """
    names = _names(name)
    if full and quick:
        raise UserError("--full and --quick must not be combined, got both")
    with checked():
        if len(names) == 1:
            load(names[0])  # refused before anything is written
        if data is not None and not data.is_dir():
            raise UserError(f"--data must be a folder, got {data}")
    began, papers, failed = time.perf_counter(), {}, {}
    for one in names:
        try:
            result = run_paper(one, folder, full=full, quick=quick, seed=seed, data=data, console=out.console)
        except Exception as error:
            if len(names) == 1 or os.environ.get("SAMPLEX_DEBUG"):
                raise
            failed[one] = f"{type(error).__name__}: {error}"
            out.warn(f"{one}: {failed[one]}")
            continue
        _say(out, result)
        papers[one] = {
            "folder": str(result.folder),
            "wall_seconds": result.found["wall_seconds"],
            "size": result.found["size"],
            "claims": result.claims,
            "deviations": result.found["deviations"],
        }
    index = write_index(folder)
    out.say(f"{index} ({time.perf_counter() - began:.0f} s in total)")
    payload: dict[str, Any] = {"status": "error" if failed else "finished", "index": str(index), "papers": papers}
    if failed:
        payload["failed"] = failed
    return payload, PROBLEM if failed else OK
