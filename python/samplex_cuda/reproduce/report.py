"""The frame of a reproduced paper: what was measured, tables, figures, and the files they end in.

A run folder holds results.json (everything that was measured), report.md and the figures as PNG. It is written as a
whole at the end, each file under a temporary name first, so an interrupted run leaves an older one as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

__all__ = ["COLOURS", "NAMES", "Result", "Run", "load", "plain", "run_paper", "style_axes", "write_index"]

NAMES = ("adversarial", "kernel", "rff", "attention", "contrastive")
COLOURS = ("#0f766e", "#c2710c", "#7c3aed", "#be123c", "#2563eb", "#65a30d", "#6e7781", "#a16207", "#0891b2")
INK, MUTED, GRID = "#1f2328", "#6e7781", "#e6e8eb"
T = TypeVar("T")
TOY = (
    "This is a toy size (--quick): it shows that everything runs. Claims that it does not confirm have no verdict; "
    "leave out --quick to test them."
)


class Step(Protocol):
    """Moves a progress bar."""

    def __call__(self, n: int = 1) -> None:
        """By `n` parts of its total."""


def plain(value: Any) -> Any:
    """A value as JSON takes it: tensors and arrays become lists, nan and infinities null.

    Example:
        >>> import torch
        >>> from samplex_cuda.reproduce.report import plain
        >>> plain({"x": torch.tensor([1.0, 2.0]), "y": float("inf")})
        {'x': [1.0, 2.0], 'y': None}
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | bool) or value is None:
        return value
    return str(value)


def _show(value: Any) -> str:
    """A cell of a table: floats with four digits, the rest as it is."""
    value = plain(value)
    if value is None:
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 1e7
        return f"{value:,.0f}" if whole and abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _write(path: Path, text: str | bytes) -> None:
    """Puts a file in place as a whole."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        temporary.write_bytes(text.encode() if isinstance(text, str) else text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def style_axes(axes: Any) -> None:
    """The look of every figure here: a light grid, no frame above and on the right.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from samplex_cuda.reproduce.report import style_axes
        >>> axes = Figure().add_subplot()
        >>> style_axes(axes)
        >>> axes.spines["top"].get_visible()
        False
    """
    axes.grid(True, color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


@dataclasses.dataclass
class Result:
    """What a run left behind: its folder, and what results.json holds.

    Example:
        >>> from pathlib import Path
        >>> from samplex_cuda.reproduce import Result
        >>> Result("kernel", Path("runs/reproduce/kernel"), {"claims": []}).claims
        []
    """

    name: str
    folder: Path
    found: dict[str, Any]

    @property
    def claims(self) -> list[dict[str, Any]]:
        """The rows of the table "the paper says / measured here"."""
        return self.found["claims"]


class Run:
    """A paper in work. A module of a paper gets one and tells it what it measures.

    Args:
        name: of the paper, e.g. "kernel".
        out: the run folder.
        full: the paper's size.
        quick: seconds, to see that everything runs.
        seed: of everything random.
        data: folder with eurlex4k/, wikitext2/, imdb/, gowalla/; without it those parts are left out.
        console: a rich console for text and progress bars; without it nothing is printed.

    Example:
        >>> from pathlib import Path
        >>> from samplex_cuda.reproduce import Run
        >>> r = Run("kernel", Path("runs/reproduce/kernel"), quick=True)
        >>> r.scale(quick=10, default=100, full=1000)
        10
        >>> r.claim("more samples, less bias", "yes", "bias 0.1 at m = 10, 0.01 at m = 100", holds=True)
        >>> r.claims[0]["holds"]
        True
    """

    def __init__(
        self,
        name: str,
        out: Path,
        *,
        full: bool = False,
        quick: bool = False,
        seed: int = 0,
        data: Path | None = None,
        console: Any = None,
    ) -> None:
        if full and quick:
            raise ValueError("reproduce: full and quick must not both be True, got True for both")
        self.name, self.out, self.full, self.quick, self.seed = name, Path(out), full, quick, seed
        self.data = Path(data) if data is not None else None
        self.console = console
        self.claims: list[dict[str, Any]] = []
        self.deviations: list[str] = []
        self.values: dict[str, Any] = {}
        self.parts: list[dict[str, Any]] = []  # the body of the report, in order
        self._pictures: dict[str, bytes] = {}

    # ------------------------------------------------------------------------------------------ what is measured
    def scale(self, *, quick: T, default: T, full: T) -> T:
        """The value for the size of this run."""
        return full if self.full else quick if self.quick else default

    def claim(
        self,
        name: str,
        paper: str,
        measured: str,
        *,
        holds: bool | None = None,
        note: str = "",
        at_any_size: bool = False,
    ) -> None:
        """A row of the table "the paper says | measured here | holds".

        A quick run can confirm a claim but not refute it: False becomes None there, with a note. `at_any_size` is for
        claims that a counterexample refutes, however small.
        """
        if self.quick and holds is False and not at_any_size:
            holds, note = None, "; ".join(filter(None, [note, "not at this toy size"]))
        self.claims.append({"name": name, "paper": paper, "measured": measured, "holds": holds, "note": note})

    def deviation(self, text: str) -> None:
        """A way in which this differs from the paper, or an error of the paper that is corrected here; once each."""
        if text not in self.deviations:
            self.deviations.append(text)

    def table(self, title: str, columns: list[str], rows: list[list[object]], note: str = "") -> None:
        """A table of the report; floats are shown with four digits."""
        if any(len(row) != len(columns) for row in rows):
            raise ValueError(f"table: every row must have {len(columns)} cells ({title}), got another number")
        self.parts.append({"kind": "table", "title": title, "columns": columns, "rows": plain(rows), "note": note})

    def text(self, markdown: str) -> None:
        """Paragraphs, lists and headings of the report, in plain Markdown."""
        self.parts.append({"kind": "text", "text": markdown.strip()})

    def value(self, name: str, value: Any) -> None:
        """Something for results.json only."""
        self.values[name] = plain(value)

    @contextlib.contextmanager
    def figure(self, stem: str, title: str, caption: str = "", size: tuple[float, float] = (7, 4)) -> Iterator[Any]:
        """A matplotlib Figure that is stored as `<stem>.png`.

        Axes made in the block get their grid at its end; nothing of pyplot is touched.
        """
        try:
            import matplotlib as mpl
            from cycler import cycler
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("reproduce: needs matplotlib: pip install 'samplex-cuda[cli]'") from None
        rc: Any = {
            "font.family": "DejaVu Sans",
            "font.size": 9.5,
            "text.color": INK,
            "axes.edgecolor": MUTED,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "axes.prop_cycle": cycler(color=COLOURS),
            "legend.frameon": False,
            "legend.fontsize": 8.5,
            "lines.linewidth": 1.6,
            "lines.markersize": 4,
        }
        with mpl.rc_context(rc):
            figure = Figure(figsize=size, dpi=140, layout="constrained")
            canvas = FigureCanvasAgg(figure)
            yield figure
            for axes in figure.axes:
                style_axes(axes)
            figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
            stored = io.BytesIO()
            canvas.print_png(stored, metadata={"Software": None}, pil_kwargs={"optimize": True})
        self._pictures[f"{stem}.png"] = stored.getvalue()
        self.parts.append({"kind": "figure", "file": f"{stem}.png", "title": title, "caption": caption})

    @contextlib.contextmanager
    def progress(self, what: str, total: int) -> Iterator[Step]:
        """A progress bar where there is a terminal, a line if there is none, nothing without a console."""
        if self.console is None or not self.console.is_terminal:
            if self.console is not None:
                self.console.print(f"{self.name}: {what}", markup=False, soft_wrap=True)

            def skip(n: int = 1) -> None:
                pass

            yield skip
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as bars:
            task = bars.add_task(f"{self.name}: {what}", total=total)

            def advance(n: int = 1) -> None:
                bars.advance(task, n)

            yield advance

    # ------------------------------------------------------------------------------------------ files
    def folder(self, name: str) -> Path | None:
        """`data/<name>` where it is there; otherwise None, and the report says that it was left out."""
        found = self.data / name if self.data is not None else None
        if found is not None and found.is_dir():
            return found
        where = "no --data was given" if self.data is None else f"the folder of --data has no {name}/"
        self.deviation(f"The part on {name} was left out: {where}.")
        return None

    def finish(self, title: str, paper: str, began: tuple[float, float]) -> Result:
        """Writes results.json, report.md and the figures."""
        import samplex_cuda as sx

        found: dict[str, Any] = {
            "name": self.name,
            "title": title,
            "paper": paper,
            "size": self.scale(quick="quick", default="default", full="full"),
            "seed": self.seed,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "wall_seconds": round(time.perf_counter() - began[0], 1),
            "processor_seconds": round(time.process_time() - began[1], 1),
            "machine": {"cpu": _cpu(), "threads": torch.get_num_threads()},
            "versions": {"samplex_cuda": sx.__version__, "torch": torch.__version__},
            "claims": self.claims,
            "deviations": self.deviations,
            "values": self.values,
            "parts": self.parts,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        for old in _pictures_of(self.out):
            if old not in self._pictures:
                (self.out / old).unlink(missing_ok=True)
        for file, content in self._pictures.items():
            _write(self.out / file, content)
        _write(self.out / "report.md", _markdown(found))
        _write(self.out / "results.json", json.dumps(plain(found), indent=1) + "\n")
        return Result(self.name, self.out, plain(found))


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{os.cpu_count()} cores"


def _pictures_of(folder: Path) -> list[str]:
    """The figures of the run that lies there, by its results.json."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        parts = json.loads((folder / "results.json").read_text())["parts"]
        return [Path(part["file"]).name for part in parts if part["kind"] == "figure"]
    return []


def _holds(value: bool | None) -> str:
    return "\u2013" if value is None else "yes" if value else "**no**"


def _cell(value: Any) -> str:
    return _show(value).replace("|", "\\|").replace("\n", " ")


def _lines(columns: list[str], rows: list[list[Any]]) -> str:
    numbers = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    marks = ["--:" if number else "---" for number in numbers]
    body = [[_cell(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [[_cell(c) for c in columns], marks, *body])


def _facts(found: dict[str, Any]) -> str:
    return (
        f"Size: {found['size']}, seed {found['seed']}; {found['wall_seconds']:.0f} s "
        f"({found['processor_seconds']:.0f} s of processors) on {found['machine']['cpu']}, "
        f"{found['machine']['threads']} threads; "
        f"samplex-cuda {found['versions']['samplex_cuda']}, torch {found['versions']['torch']}; {found['date'][:10]}."
    )


def _markdown(found: dict[str, Any]) -> str:
    blocks = [f"# {found['title']}", found["paper"], _facts(found)]
    blocks += [f"**{TOY}**"] if found["size"] == "quick" else []
    blocks.append("## The paper says, measured here")
    claims = [
        [c["name"], c["paper"], c["measured"] + (f" ({c['note']})" if c["note"] else ""), _holds(c["holds"])]
        for c in found["claims"]
    ]
    blocks.append(_lines(["", "the paper says", "measured here", "holds"], claims) if claims else "Nothing to compare.")
    for part in found["parts"]:
        if part["kind"] == "text":
            blocks.append(part["text"])
        elif part["kind"] == "table":
            blocks += [f"### {part['title']}", _lines(part["columns"], part["rows"])]
            blocks += [part["note"]] if part["note"] else []
        else:
            blocks += [f"### {part['title']}", f"![{part['title']}]({part['file']})"]
            blocks += [part["caption"]] if part["caption"] else []
    blocks.append("## Deviations, and errors of the paper that are corrected")
    blocks.append("\n".join(f"- {text}" for text in found["deviations"]) or "None.")
    return "\n\n".join(blocks) + "\n"


# ---------------------------------------------------------------------------------------------------- the papers
def load(name: str) -> Any:
    """The module of a paper; an ImportError with a clear message where this build has none.

    Example:
        >>> from samplex_cuda.reproduce import load
        >>> try:
        ...     load("alchemy")
        ... except ValueError as error:
        ...     print(error)
        reproduce: NAME must be one of adversarial, kernel, rff, attention, contrastive, got 'alchemy'
    """
    if name not in NAMES:
        raise ValueError(f"reproduce: NAME must be one of {', '.join(NAMES)}, got {name!r}")
    path = f"samplex_cuda.reproduce.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise ImportError(f"reproduce: {name} is not in this build of samplex-cuda; install a newer version") from None


def run_paper(
    name: str,
    out: Path | str,
    *,
    full: bool = False,
    quick: bool = False,
    seed: int = 0,
    data: Path | str | None = None,
    console: Any = None,
) -> Result:
    """Runs a paper's experiments and writes its run folder `out/<name>`.

    Args:
        name: one of `NAMES`.
        out: the folder above the run folder.
        full, quick, seed, data, console: see `Run`.

    Example:
        >>> from samplex_cuda.reproduce import run_paper
        >>> run_paper("kernel", "runs/reproduce", quick=True)  # doctest: +SKIP
    """
    module = load(name)
    if data is not None and not Path(data).is_dir():
        raise ValueError(f"reproduce: --data must be a folder, got {data}")
    r = Run(
        name,
        Path(out) / name,
        full=full,
        quick=quick,
        seed=seed,
        data=Path(data) if data is not None else None,
        console=console,
    )
    began = time.perf_counter(), time.process_time()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        work: Callable[[Run], None] = module.run
        work(r)
    return r.finish(module.TITLE, module.PAPER, began)


def write_index(out: Path | str) -> Path:
    """Writes `out/index.html` over all run folders below `out`: one page with the figures inside, no network needed.

    Example:
        >>> import tempfile
        >>> from samplex_cuda.reproduce import write_index
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_index(folder).name
        'index.html'
    """
    from samplex_cuda.reproduce.page import page

    out = Path(out)
    found = []
    for path in out.glob("*/results.json"):
        with contextlib.suppress(OSError, ValueError):
            one = json.loads(path.read_text())
            if isinstance(one, dict) and {"name", "title", "claims", "parts"} <= one.keys():
                found.append((path.parent, one))
    order = {name: i for i, name in enumerate(NAMES)}
    found.sort(key=lambda one: (order.get(one[1]["name"], len(order)), one[0].name))
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "index.html", page(found))
    return out / "index.html"
