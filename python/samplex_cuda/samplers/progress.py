"""The progress bar of a build."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["bar"]


@contextlib.contextmanager
def bar(classes: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """What to call with the number of classes done: a bar on a terminal where rich is there, else nothing."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda done: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        yield lambda done: None
        return
    columns = (
        TextColumn("summing features"),
        BarColumn(bar_width=32),
        TextColumn("{task.completed:,}/{task.total:,} classes"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("build", total=classes)
        yield lambda done: bars.update(task, completed=done)
