"""What `diagnose` found: numbers as dataclasses, JSON, a text table, a plot."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Diagnosis", "Point", "SamplerResult"]

BUSY = 0.3  # cores that are missing
_COLOURS = ("#888888", "#2b6cb0", "#3b8f5a", "#c0392b", "#c27b2b", "#6b46c1", "#d35fb7", "#111111", "#2c9c9c")


@dataclasses.dataclass
class Point:
    """One sampler with one number of samples. Bias and std are of the gradient in the logits.

    Attributes:
        num_samples: m.
        ess: effective sample size, mean over rows.
        hit_rate: share of rows that would draw their target at least once, were it not excluded or masked.
        bias: norm of the bias, root mean square over rows: the best number there is, see `measured`.
        bias_leading: the same from the terms up to order 1/m alone, over all rows.
        bias_error: standard error of the measured part of `bias`; 0 where it is all formula.
        excess: mean over rows of |bias|^2 less that of Uniform with the same m; None if there is no such.
        excess_error: its standard error; 0 where nothing was measured.
        measured: share of the rows whose bias was measured from draws, because m is too small for the leading term.
        std: root of the total variance of one row's gradient, root mean square over rows.
        leak: share of the softmax above m q, which these draws cannot push down, mean over up to 64 rows; see
            `sx.diagnostics.leak`.
        step_ms: draw + loss + backward of all rows, and update of a sampler that follows the weights, a median; None:
            not timed.
        step_error: half the distance between the quartiles of the times.
        draw_ms: the draw alone.
        update_ms: the update alone.

    Example:
        >>> import samplex_cuda.diagnostics as diagnostics
        >>> diagnostics.Point(num_samples=8, ess=4.0, hit_rate=0.1, bias=0.02, bias_leading=0.02, std=0.3).measured
        0.0
    """

    num_samples: int
    ess: float
    hit_rate: float
    bias: float
    bias_leading: float
    std: float
    bias_error: float = 0.0
    measured: float = 0.0
    excess: float | None = None
    excess_error: float = 0.0
    leak: float = 0.0
    step_ms: float | None = None
    step_error: float = 0.0
    draw_ms: float | None = None
    update_ms: float | None = None


@dataclasses.dataclass
class SamplerResult:
    """One sampler: how its distribution compares with the model's softmax, both over the classes other than the target.

    Attributes:
        name: as in the table.
        kind: class of the sampler.
        own: whether it is the sampler of the head.
        exact: whether every class was examined; otherwise the numbers are estimates from draws.
        kl: KL(softmax || q), mean over rows; inf where q is 0 somewhere and softmax is not.
        tv: total variation, mean over rows.
        ess_share: effective sample size per sample, mean over rows.
        log_q_min: smallest log q that can be drawn, over all rows.
        log_q_max: largest.
        log_ratio_max: largest log(e^o / q).
        missing: share of the softmax on classes that are never drawn, mean over rows.
        follows: whether the sampler depends on the class table.
        stale_rows: share of the sampler's class rows that differ from the head's; None if it keeps none.
        drift: |sampler's rows - head's| / |head's|; None as above.
        stale_steps: training forwards since the head brought it up to date.
        stratified: whether draws are stratified: `step_ms` is of that, bias and std of independent draws.
        shared: whether the batch shares its draws.
        points: one for each number of samples.

    Example:
        >>> import samplex_cuda.diagnostics as diagnostics
        >>> diagnostics.SamplerResult(name="Uniform", kind="Uniform").exact
        True
    """

    name: str
    kind: str
    own: bool = False
    exact: bool = True
    kl: float = 0.0
    tv: float = 0.0
    ess_share: float = 1.0
    log_q_min: float = 0.0
    log_q_max: float = 0.0
    log_ratio_max: float = 0.0
    missing: float = 0.0
    follows: bool = False
    stale_rows: float | None = None
    drift: float | None = None
    stale_steps: int = 0
    stratified: bool = False
    shared: bool = False
    points: list[Point] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        num_classes: C.
        in_features: d.
        rows: how many rows were examined.
        loss: of the head.
        shared: whether targets are masked (shared draws) instead of excluded.
        seed: of the draws.
        gradient_norm: |gradient of the full softmax in the logits|, root mean square over rows.
        head_samples: `num_samples` of the head.
        samplers: the result of each sampler.
        full_ms: a step of the full softmax over the same rows, a median; None: not timed.
        full_error: half the distance between the quartiles of its times.
        lacking: cores that were missing while steps were timed, because of other processes; None: not known.
        recommendation: in words.
        warnings: in words.
        of_its_loss: whether bias and std are those of the head's own loss.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 200, sx.samplers.Uniform(200), num_samples=16)
        >>> found = sx.diagnostics.diagnose(head, torch.randn(32, 8), num_samples=(4, 16), timed=False)
        >>> print(found.table())  # doctest: +ELLIPSIS
        200 classes, 8 features, 32 rows...
        >>> sx.diagnostics.Diagnosis.from_dict(found.as_dict()) == found
        True
    """

    num_classes: int
    in_features: int
    rows: int
    loss: str
    shared: bool
    seed: int
    gradient_norm: float
    head_samples: int
    samplers: list[SamplerResult] = dataclasses.field(default_factory=list)
    full_ms: float | None = None
    full_error: float = 0.0
    lacking: float | None = None
    recommendation: str = ""
    warnings: list[str] = dataclasses.field(default_factory=list)
    of_its_loss: bool = True

    @property
    def laws(self) -> list[SamplerResult]:
        """`samplers` under its name before 0.2."""
        return self.samplers

    @property
    def busy(self) -> bool:
        """Whether other processes took so much of the machine that times cannot be compared."""
        return self.lacking is not None and self.lacking > BUSY

    # -------------------------------------------------------------------------------------------- JSON
    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it (an infinite KL is null)."""
        out = dataclasses.asdict(self)
        for law in out["samplers"]:
            law["kl"] = law["kl"] if math.isfinite(law["kl"]) else None
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Diagnosis:
        """The inverse of `as_dict`."""
        samplers = []
        values = {("samplers" if name == "laws" else name): value for name, value in values.items()}  # before 0.2
        for law in values["samplers"]:
            kl = math.inf if law["kl"] is None else law["kl"]
            samplers.append(SamplerResult(**{**law, "kl": kl, "points": [Point(**point) for point in law["points"]]}))
        return cls(**{**values, "samplers": samplers, "warnings": list(values["warnings"])})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `as_dict` as JSON: to a temporary name beside, then renamed."""
        path = Path(path)
        scratch = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        scratch.unlink(missing_ok=True)  # never through a link that is there already
        try:
            with open(scratch, "x") as file:
                json.dump(self.as_dict(), file, indent=1, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Diagnosis:
        """Read what `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text()))

    # -------------------------------------------------------------------------------------------- text
    def relative(self, value: float) -> float:
        """`value` as a share of the norm of the full gradient."""
        return value / self.gradient_norm if self.gradient_norm > 0 else (0.0 if value == 0 else math.inf)

    def _head_line(self) -> str:
        full = "" if self.full_ms is None else f"; a step of the full softmax: {_ms(self.full_ms)} ms"
        return (
            f"{self.num_classes:,} classes, {self.in_features} features, {self.rows} rows; targets "
            f"{'masked (shared draws)' if self.shared else 'excluded'}{full}"
        )

    def _law_table(self) -> tuple[list[str], list[list[str]]]:
        names = ["sampler", "KL", "TV", "ESS/m", "log q", "max log e^o/q", "never drawn", "stale", "from"]
        rows = []
        for law in self.samplers:
            stale = "-" if law.drift is None else "no" if law.drift == 0 else f"{_percent(law.drift)} %"
            rows.append(
                [
                    f"{law.name} (head)" if law.own else law.name,
                    "inf" if math.isinf(law.kl) else f"{law.kl:.3g}",
                    f"{law.tv:.3f}",
                    f"{law.ess_share:.3g}",
                    f"{law.log_q_min:.1f} to {law.log_q_max:.1f}",
                    f"{law.log_ratio_max:.1f}",
                    "-" if law.missing == 0 else f"{_percent(law.missing)} %",
                    stale,
                    "exact" if law.exact else "draws",
                ]
            )
        return names, rows

    def _point_table(self) -> tuple[list[str], list[list[str]]]:
        timed = any(point.step_ms is not None for law in self.samplers for point in law.points)
        names = [
            "sampler",
            "m",
            "ESS",
            "hit %",
            "leak %",
            "bias %",
            "std %",
            *(["draw ms", "step ms"] if timed else []),
        ]
        rows = []
        for law in self.samplers:
            for number, point in enumerate(law.points):
                mark = "*" if point.measured else ""
                row = [
                    law.name if number == 0 else "",
                    f"{point.num_samples:,}",
                    f"{point.ess:.1f}",
                    _percent(point.hit_rate),
                    _percent(point.leak),
                    f"{self._bias(point)}{mark}",
                    _percent(self.relative(point.std)),
                ]
                rows.append(
                    row + ([_ms(point.draw_ms), f"{_ms(point.step_ms)} ± {_ms(point.step_error)}"] if timed else [])
                )
        return names, rows

    def _bias(self, point: Point) -> str:
        """In percent; "<" where it is not told from 0: two standard errors."""
        if point.bias**2 < 2.0 * point.bias_error:
            return f"< {_percent(self.relative(math.sqrt(point.bias**2 + 2.0 * point.bias_error)))}"
        return _percent(self.relative(point.bias))

    def _notes(self) -> list[str]:
        notes = ["bias and std: of the gradient in the logits, % of the norm of the full one, root mean square of rows"]
        if any(point.measured for law in self.samplers for point in law.points):
            notes.append("*: measured from draws in rows where m is too small for the leading term")
        if not all(law.exact for law in self.samplers):
            notes.append("draws: estimated from draws, which miss classes that were not drawn")
        return notes

    def table(self) -> str:
        """Everything as plain text."""
        parts = [self._head_line(), "", _text(*self._law_table()), "", _text(*self._point_table()), *self._notes()]
        parts += ["", self.recommendation, *(f"warning: {warning}" for warning in self.warnings)]
        return "\n".join(parts).rstrip()

    def show(self) -> None:
        """Print the tables: with rich where it is installed, else as `table()`."""
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            print(self.table())
            return
        console = Console()
        console.print(Text(self._head_line()))
        for names, rows in (self._law_table(), self._point_table()):
            table = Table()
            for number, name in enumerate(names):
                table.add_column(name, justify="right" if number else "left")
            for row in rows:
                table.add_row(*(Text(cell) for cell in row))
            console.print(table)
        for note in self._notes():
            console.print(Text(note, style="dim"))
        console.print(Text(self.recommendation, style="bold"))
        for warning in self.warnings:
            console.print(Text(f"warning: {warning}", style="yellow"))

    # -------------------------------------------------------------------------------------------- plot
    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw bias and std against m, and bias against the time of a step where it was timed, into a PNG file.

        Needs matplotlib: `pip install 'samplex-cuda[demo]'`.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "Diagnosis.plot: matplotlib must be installed, e.g. pip install 'samplex-cuda[demo]'"
            ) from error
        timed = any(point.step_ms is not None for law in self.samplers for point in law.points)
        panels = 3 if timed else 2
        figure = Figure(figsize=(4.2 * panels + 1.6, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, panels)
        for number, law in enumerate(self.samplers):
            style = {"color": _COLOURS[number % len(_COLOURS)], "marker": "o", "markersize": 3}
            style["linestyle"] = "-" if number < len(_COLOURS) else "--"
            m = [point.num_samples for point in law.points]
            bias = [100 * self.relative(point.bias) for point in law.points]
            axes[0].plot(m, bias, label=law.name, **style)
            axes[1].plot(m, [100 * self.relative(point.std) for point in law.points], **style)
            times = [(point.step_ms, b) for point, b in zip(law.points, bias, strict=True) if point.step_ms is not None]
            if times:
                axes[2].plot([t for t, _ in times], [b for _, b in times], **style)
        labels = [("samples m", "bias of the gradient, %"), ("samples m", "standard deviation of the gradient, %")]
        labels += [("time of a step, ms", "bias of the gradient, %")]
        for one, (x, y) in zip(axes, labels, strict=False):
            one.set_xscale("log")
            one.set_yscale("log")
            for axis in (one.xaxis, one.yaxis):
                low, high = axis.get_view_interval()
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(_between(high / low))
            one.set_xlabel(x)
            one.set_ylabel(y)
        if timed and self.full_ms is not None:
            axes[2].axvline(self.full_ms, color="#111111", linestyle=":", linewidth=1)
            axes[2].set_title("dotted: the full softmax", fontsize=8)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
        path = Path(path)
        scratch = path.with_name(f"{path.name}.tmp")
        with open(scratch, "wb") as file:
            figure.savefig(file, dpi=150, format="png")
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)


def _between(span: float) -> Callable[[float, object], str]:
    """Labels between the powers of ten of an axis: none, at 2 and 5, or all, the shorter the more."""
    digits = "" if span >= 100 else "25" if span >= 5 else "23456789"
    return lambda value, _: f"{value:g}" if f"{value:e}"[0] in digits else ""


def _percent(share: float) -> str:
    value = 100.0 * share
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}" if value >= 1e-4 else "0"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _text(names: list[str], rows: list[list[str]]) -> str:
    width = [max(len(row[k]) for row in [names, *rows]) for k in range(len(names))]
    lines = []
    for row in [names, ["-" * w for w in width], *rows]:
        cells = [cell.ljust(w) if k == 0 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, width, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
