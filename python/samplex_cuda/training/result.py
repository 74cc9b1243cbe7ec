"""How a run ends: a result, or a loss that is not finite."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NoReturn

__all__ = ["NonFiniteLossError", "Result", "raise_non_finite"]


class NonFiniteLossError(RuntimeError):
    """A loss that is nan or infinite; the message names the step and the file with the batch.

    Example:
        >>> from samplex_cuda.training import NonFiniteLossError
        >>> issubclass(NonFiniteLossError, RuntimeError)
        True
    """


@dataclasses.dataclass
class Result:
    """What `Trainer.fit` did.

    Attributes:
        status: "finished", "early_stop" or "interrupted".
        step: steps done.
        metrics: of the last evaluation.
        best: the best value of the monitored metric, None without evaluation.
        best_step: when that was.
        message: for a person; after an interruption it says how to resume.
        signal: number of the signal that interrupted it; 0: none.
        warnings: what is wrong with the model by the last evaluation; empty: nothing was found.

    Example:
        >>> from samplex_cuda.training import Result
        >>> Result("finished", 10, {"nll": 1.0}, 1.0, 10, "").status
        'finished'
    """

    status: str
    step: int
    metrics: dict[str, float]
    best: float | None
    best_step: int
    message: str
    signal: int = 0
    warnings: list[str] = dataclasses.field(default_factory=list)


def raise_non_finite(step: int, problem: str, run_dir: Path, left_out: int) -> NoReturn:
    """NonFiniteLossError for a step, after `left_out` steps in succession that were skipped for the same reason."""
    advice = (
        f"Continue from the last checkpoint with Trainer.resume({str(run_dir)!r}, settings=...): a smaller "
        "optimizer.lr, training.clip_norm=1, or training.on_nan=skip"
    )
    if left_out:
        raise NonFiniteLossError(
            f"trainer: step {step}: {problem}, after {left_out} steps in succession were skipped for the same reason; "
            f"the weights themselves are no longer usable. {advice}"
        )
    raise NonFiniteLossError(f"trainer: step {step}: {problem}. {advice}")
