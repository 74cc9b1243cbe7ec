"""Whether what a run trains is any good: the exact loss beside the sampled one, and what the sampler never draws."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from samplex_cuda import samplers
from samplex_cuda.data import Dataset
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.heads.leak import LEAK
from samplex_cuda.heads.leak import leak as leak_of
from samplex_cuda.training import models
from samplex_cuda.training.ranks import Alone

__all__ = ["FAR", "NEVER", "check_model", "some_rows"]

FAR = 2.0  # nats between the exact and the sampled loss from which on the latter says little
NEVER = math.log(1e3)  # a class that is drawn so much more rarely than by uniform draws is never drawn
MORE = 1.25  # times the leak of as many draws by class frequency
_ROWS = 128
_LEAK_ROWS = 32
_LEAK_NUMBERS = 1 << 26  # rows x classes


@torch.no_grad()
def check_model(
    encoder: models.Encoder,
    head: SampledClassifier,
    train: Dataset,
    batch_size: int,
    *,
    sampled: float | None = None,
    nll: float | None = None,
    ranks: Alone | None = None,
    numbers: dict[str, float] | None = None,
) -> list[str]:
    """What is wrong with a model in training, in sentences; empty: nothing was found.

    Looks at up to 128 targets of the first training batch, over all classes. Encoder and head are left as they were.

    Args:
        encoder: gives h.
        head: the classifier.
        train: the training data.
        batch_size: examples of a batch.
        sampled: mean training loss of the last steps; None: not known, or of a loss that does not estimate the NLL.
        nll: the exact NLL on validation data; None: not known.
        ranks: as in `evaluate`.
        numbers: takes "leak" (`sx.diagnostics.leak`), where the sampler has one.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, build
        >>> from samplex_cuda.training.watch import check_model
        >>> train = data.Dense(torch.randn(20, 6), torch.randint(0, 9, (20,)))
        >>> check_model(*build(Config(), train), train, 16, nll=2.5)  # doctest: +ELLIPSIS
        ['the exact NLL on validation data, 2.5, is above log C = 2.197: ...']
    """
    found: list[str] = []
    limit = math.log(head.num_classes)
    if nll is not None and not nll <= limit:
        found.append(
            f"the exact NLL on validation data, {nll:.4g}, is above log C = {limit:.4g}: the model is worse than equal "
            "probabilities for all classes"
        )
    ranks = Alone() if ranks is None else ranks
    h, y, features, context = some_rows(encoder, head, train, batch_size, ranks)
    if not any(ranks.gather(len(h))):
        return found
    exact = _exact(head, h, y, features)
    # A gap to validation data may be overfitting; on training data only the draws can be the reason.
    if sampled is not None and exact - sampled > FAR:
        found.append(
            f"the exact NLL on training data is {exact:.4g} where the sampled loss is {sampled:.4g}: the draws miss "
            "classes that the model rates high, and the loss that falls is not the one that counts. More draws "
            "(head.num_samples) or another sampler help: samplex diagnose"
        )
    leak = _leak(head, h, y, features, context, ranks)
    if leak is not None:
        if numbers is not None:
            numbers["leak"] = leak
        if leak > LEAK:
            # Few draws leak from any distribution: the way out depends on whether frequencies would do better.
            by_frequency = _leak_of_frequencies(head, h, y, train)
            mix = "Mix in a fixed distribution (sampler.base = unigram), draw" if leak > MORE * by_frequency else "Draw"
            found.append(
                f"{leak:.0%} of the softmax leaks: it is on classes that {head.num_samples:,} draws take too rarely to "
                f"push them down (draws by class frequency: {by_frequency:.0%}). {mix} more (head.num_samples), or see "
                "samplex diagnose"
            )
    if head.sampler is not None:
        best = head.topk(h, 1, features=features)[1]
        drawn = ranks.log_q(head, h if features is None else features, best, context)[:, 0]
        drawn = torch.cat(ranks.gather(drawn.float().cpu()))
        middle = float(drawn.nan_to_num(-math.inf, math.inf, -math.inf).median())
        if middle < -limit - NEVER:
            found.append(
                f"the sampler never draws what the model rates highest: log q of its first class is {middle:.4g} "
                f"(median of {len(drawn)} rows), uniform draws have {-limit:.4g}. Mix in a fixed distribution "
                "(sampler.base = unigram), or fit the tree again (sampler.refit_every = 1)"
            )
    return found


def _leak_of_frequencies(head: SampledClassifier, h: Tensor, y: Tensor, train: Dataset) -> float:
    """What as many draws by class frequency would leak."""
    some = _leak_rows(head)
    other = samplers.Unigram(train.class_counts().double() + 1.0).to(head.weight.device)
    return float(leak_of(head, h[some], y[some], sampler=other).mean())


def _leak_rows(head: SampledClassifier) -> slice:
    return slice(0, max(4, min(_LEAK_ROWS, _LEAK_NUMBERS // head.num_classes)))


def _leak(
    head: SampledClassifier, h: Tensor, y: Tensor, features: Tensor | None, context: Tensor | None, ranks: Alone
) -> float | None:
    """Mean leak of a few rows; None for a head without draws, over several ranks, or on the sphere."""
    known = head.sampler is not None and not getattr(head.sampler, "takes_targets", False)
    plain = (
        not head.normalize and head.log_scale is None and head.live is None and getattr(head.loss, "corrected", True)
    )
    if not known or not plain or type(ranks) is not Alone or not len(h):
        return None
    some = _leak_rows(head)
    one = None if features is None else features[some]
    given = None if context is None else context[some]
    return float(head.leak(h[some], y[some], features=one, context=given).mean())


@torch.no_grad()
def some_rows(
    encoder: models.Encoder, head: SampledClassifier, train: Dataset, batch_size: int, ranks: Alone | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """h [n, d], targets, what the sampler looks at and its context, of some training examples that have a target.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, build
        >>> from samplex_cuda.training.watch import some_rows
        >>> train = data.Dense(torch.randn(20, 6), torch.randint(0, 9, (20,)))
        >>> some_rows(*build(Config(), train), train, 16)[0].shape
        torch.Size([16, 6])
    """
    ranks = Alone() if ranks is None else ranks
    size = int(getattr(train, "columns", _ROWS)) if train.ordered else min(_ROWS, batch_size)
    rows = ranks.part(torch.arange(min(size, len(train))))
    batch = {name: t.to(head.weight.device) for name, t in ranks.batch(train, rows).items()}
    training, carried = encoder.training, encoder.carried()
    try:
        encoder.eval()
        encoder.carry({})
        h, features = encoder.encode(batch)
    finally:
        encoder.train(training)
        encoder.carry(carried)
    y = batch["y"]
    several = y.dim() == h.dim()
    h = h.to(head.weight.dtype).reshape(-1, h.shape[-1])
    y = y.reshape(-1, y.shape[-1]) if several else y.reshape(-1)
    valid = ((y >= 0).any(1) if several else y >= 0).nonzero().squeeze(1)[:_ROWS]
    context = models.context_of(batch)
    return (
        h[valid],
        y[valid],
        None if features is None else features.reshape(-1, features.shape[-1])[valid],
        None if context is None else context[valid],
    )


def _exact(head: SampledClassifier, h: Tensor, y: Tensor, features: Tensor | None) -> float:
    training = head.training
    try:
        nn.Module.train(head, False)  # not head.eval(): going back would count as a new epoch for its sampler
        return float(head(h, y, features=features))
    finally:
        nn.Module.train(head, training)
