"""Metrics of a model on a data set, exact over all classes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from samplex_cuda.data import Batches, Dataset
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.training import models
from samplex_cuda.training.config import Training
from samplex_cuda.training.ranks import Alone

__all__ = ["check_metrics", "evaluate", "propensities_of"]


def propensities_of(settings: Training, train: Dataset) -> Tensor | None:
    """Propensities of the classes by the training data [C], where a metric asks for them."""
    if not any(name.startswith("psp") for name in settings.metrics):
        return None
    from samplex_cuda.metrics import propensities

    return propensities(train.class_counts(), len(train), settings.propensity_a, settings.propensity_b)


@torch.no_grad()
def evaluate(
    encoder: models.Encoder,
    head: SampledClassifier,
    dataset: Dataset,
    *,
    batch_size: int = 256,
    metrics: Iterable[str] = ("nll", "accuracy"),
    rows: int = 0,
    exclude_history: bool = False,
    propensities: Tensor | None = None,
    on_batch: Callable[[int, int], None] | None = None,
    ranks: Alone | None = None,
) -> dict[str, float]:
    """Exact metrics over a data set; encoder and head are left as they were, a carried state included.

    Args:
        encoder: gives h.
        head: the classifier.
        dataset: what to measure on, in its own order.
        batch_size: examples at a time; text has its own.
        metrics: "nll" (exact, over all classes), "perplexity", "accuracy" (the best class is one of the targets), and
            those of `samplex_cuda.metrics`: "precision@5", "recall@20", "ndcg@10", "psp@3", "mrr" (over all
            classes).
        rows: only so many first examples, in whole batches; 0: all.
        exclude_history: interactions: items that a user knows are not answers.
        propensities: [C], for "psp@k".
        on_batch: called with (batches done, batches in total).
        ranks: those of a sharded head, each of which calls it and measures its part of every batch; None: one process.

    Example:
        >>> import torch
        >>> from samplex_cuda import data
        >>> from samplex_cuda.training import Config, build, evaluate
        >>> train = data.Dense(torch.randn(20, 6), torch.randint(0, 9, (20,)))
        >>> sorted(evaluate(*build(Config(), train), train, metrics=["nll", "recall@3"]))
        ['nll', 'recall@3']
    """
    from samplex_cuda.metrics import Evaluator

    ranks = Alone() if ranks is None else ranks
    names = list(metrics)
    ks = sorted(set(check_metrics("evaluate: metrics", names)) or {1})
    most = min(ks[-1], head.num_classes)
    ranked = any(name not in ("nll", "perplexity", "mrr") for name in names)
    evaluator = Evaluator(ks, propensities)
    if exclude_history and dataset.kind != "interactions":
        raise ValueError(f"evaluate: exclude_history must be off for {dataset.kind} data, got True")
    size = int(getattr(dataset, "columns", batch_size)) if dataset.ordered else batch_size
    batches = Batches(dataset, size, shuffle=False)
    count = len(batches) if not rows else min(len(batches), math.ceil(rows / size))
    device = head.weight.device
    source: Any = dataset
    training, carried, reduction = (encoder.training, head.training), encoder.carried(), head.reduction
    try:
        encoder.eval()
        nn.Module.train(head, False)  # not head.eval(): going back would count as a new epoch for its sampler
        head.reduction = "none"
        encoder.carry({})
        for number in range(count):
            chosen = ranks.part(batches.rows(number))
            batch = {name: t.to(device) for name, t in ranks.batch(dataset, chosen).items()}
            h, features = encoder.encode(batch)
            y = batch["y"]
            several = y.dim() == h.dim()
            h = h.to(head.weight.dtype).reshape(-1, h.shape[-1])
            y = y.reshape(-1, y.shape[-1]) if several else y.reshape(-1)
            features = None if features is None else features.reshape(-1, features.shape[-1])
            valid = (y >= 0).any(1) if several else y >= 0
            if not exclude_history and not bool(valid.all()):  # the rest of a last window, rows without labels
                h, y, features = h[valid], y[valid], None if features is None else features[valid]
            if len(h) or ranks.sharded:
                loss = h.new_zeros(len(h))
                if "nll" in names or "perplexity" in names:
                    loss = ranks.row_losses(head, h, y, features)
                ids = torch.zeros(len(h), ks[-1], dtype=torch.int64, device=device)
                finite = h.isfinite().all(1)
                if ranked and exclude_history:
                    ids = ranks.best_without(head, h, features, most, *source.seen(chosen))
                elif ranked:
                    ids = head.topk(h, most, features=features)[1]
                if ranked and not bool(finite.all()):
                    ids = torch.where(finite[:, None], ids, -1)  # classes of a nan row would be arbitrary
                if ranked and ks[-1] > most:  # precision@k divides by k, also with fewer classes
                    ids = torch.nn.functional.pad(ids, (0, ks[-1] - most), value=-1)
                places = None
                if "mrr" in names:
                    known = source.seen(chosen) if exclude_history else None
                    places = ranks.first_ranks(head, h, y, features, known)
                evaluator.update(ids, y, loss, ranks=places)
            if on_batch is not None:
                on_batch(number + 1, count)
    finally:
        encoder.train(training[0])
        nn.Module.train(head, training[1])
        head.reduction = reduction
        encoder.carry(carried)
    if ranks.sharded:
        evaluator.merge([part for number, part in enumerate(ranks.gather(evaluator.totals())) if number != ranks.rank])
    found = evaluator.compute()
    missing = [name for name in names if name not in found]
    if missing:
        needs = "needs propensities" if missing[0].startswith("psp") else "needs an example with a target"
        raise ValueError(f"evaluate: metrics: {missing[0]} {needs}")
    return {name: found[name] for name in names}


def check_metrics(where: str, names: Iterable[str]) -> list[int]:
    """The k's of metrics by name; ValueError for an unknown name."""
    ks = []
    for name in names:
        match = re.fullmatch(r"(?:precision|recall|ndcg|psp|psp_raw)@([1-9]\d*)", name)
        if match:
            ks.append(int(match.group(1)))
        elif name not in ("nll", "perplexity", "accuracy", "mrr"):
            wanted = "nll, perplexity, accuracy, mrr, precision@k, recall@k, ndcg@k, psp@k or psp_raw@k"
            raise ValueError(f"{where} must be {wanted}, got {name!r}")
    return ks
