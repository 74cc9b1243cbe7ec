"""Metrics of ranked classes: precision, recall, nDCG and propensity-scored precision at k, MRR, accuracy; exact NLL.

All take `ids` int64 [N, K], the classes of each row with the best first (`head.topk`), and `targets` int64 [N] or
[N, P] padded with -100. What is the same for all of them:

- **Ties** are broken before: `head.topk` puts equal logits in ascending id order, and the ranking is used unchanged.
- **Rows without a target** are left out of the means (`empty="skip"`), or count as 0 (`empty="zero"`).
- **Duplicates**: a target that occurs twice in a row counts once; an id that occurs twice in a ranking counts where it
  comes first, its second place is a miss. An id of -1 (no class) is a miss.
- A mean over no rows is nan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samplex_cuda._checks import check_dense, check_int, check_number, describe
from samplex_cuda.prediction import _stable_topk

if TYPE_CHECKING:
    from samplex_cuda.data import Dataset
    from samplex_cuda.heads import SampledClassifier

__all__ = [
    "Evaluator",
    "accuracy",
    "evaluate",
    "mrr",
    "ndcg_at_k",
    "perplexity",
    "precision_at_k",
    "propensities",
    "psp_at_k",
    "recall_at_k",
]

PAD = -100
_CELLS = 1 << 22  # comparisons held at once
_SCORES = 1 << 24  # scores that are held at a time


def _check(where: str, ids: Tensor, targets: Tensor, empty: str = "skip") -> Tensor:
    """Targets as [N, P]."""
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 2:
        raise ValueError(f"{where}: ids must be [N, K] int64, got {describe(ids)}")
    n = ids.shape[0]
    fits = isinstance(targets, Tensor) and targets.dtype == torch.int64 and targets.dim() in (1, 2)
    if not fits or targets.shape[0] != n:
        raise ValueError(f"{where}: targets must be [{n}] or [{n}, P] int64, got {describe(targets)}")
    check_dense(where, "ids", ids), check_dense(where, "targets", targets)
    if empty not in ("skip", "zero"):
        raise ValueError(f"{where}: empty must be 'skip' or 'zero', got {empty!r}")
    return targets.unsqueeze(1) if targets.dim() == 1 else targets


def _check_k(where: str, k: object, width: int) -> int:
    return check_int(where, "k", k, 1, width)


def _count(targets: Tensor) -> Tensor:
    """Number of different targets of each row [N, P], fp64 [N]."""
    order = targets.sort(dim=1)[0]
    valid = order != PAD
    if order.shape[1] > 1:
        valid[:, 1:] &= order[:, 1:] != order[:, :-1]
    return valid.sum(1).double()


def _hits(ids: Tensor, targets: Tensor) -> Tensor:
    """Where the ranking [N, K] has a target of the row [N, P] for the first time, bool [N, K]."""
    hits = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    step = max(1, _CELLS // max(1, ids.shape[1] * targets.shape[1]))
    for begin in range(0, ids.shape[0], step):
        rows = slice(begin, begin + step)
        hits[rows] = (ids[rows].unsqueeze(2) == targets[rows].unsqueeze(1)).any(2)
    hits &= ids >= 0
    if ids.shape[1] > 1:
        order, place = ids.sort(dim=1, stable=True)
        again = torch.zeros_like(hits)
        again[:, 1:] = order[:, 1:] == order[:, :-1]
        hits &= ~torch.zeros_like(hits).scatter_(1, place, again)
    return hits


def _mean(values: Tensor, count: Tensor, empty: str) -> float:
    """Mean of values [N] over the rows that count."""
    rows = int((count > 0).sum()) if empty == "skip" else count.shape[0]
    return float(values.sum()) / rows if rows else math.nan


def _discount(k: int, device: torch.device) -> Tensor:
    return torch.arange(2, k + 2, dtype=torch.float64, device=device).log2().reciprocal()


def _ndcg_rows(hits: Tensor, count: Tensor, k: int) -> Tensor:
    discount = _discount(k, hits.device)
    best = torch.cat([discount.new_zeros(1), discount.cumsum(0)])
    ideal = best[count.clamp(max=k).long()]
    return (hits[:, :k] * discount).sum(1) / torch.where(ideal > 0, ideal, 1.0)


def _psp_rows(ids: Tensor, targets: Tensor, hits: Tensor, inverse: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sum of 1 / p over the hits among the first k, and the largest that the row could have, fp64 [N] each."""
    gain = (inverse[ids[:, :k].clamp(min=0)] * hits[:, :k]).sum(1)
    order = targets.sort(dim=1)[0]
    worth = torch.where(order != PAD, inverse[order.clamp(min=0)], 0.0)
    if order.shape[1] > 1:
        worth[:, 1:] *= order[:, 1:] != order[:, :-1]
    best = worth.topk(min(k, worth.shape[1]), dim=1)[0].sum(1)
    return gain, best


# ------------------------------------------------------------------------------------------------ functions
def precision_at_k(ids: Tensor, targets: Tensor, k: int, *, empty: str = "skip") -> float:
    """Share of the first k that are targets, mean over rows. Always divided by k, also where a row has fewer targets.

    Args:
        ids: int64 [N, K], best first.
        targets: int64 [N], or [N, P] padded with -100.
        k: at most K.
        empty: "skip" or "zero": rows without a target.

    Example:
        >>> import torch
        >>> from samplex_cuda import metrics
        >>> metrics.precision_at_k(torch.tensor([[4, 1, 3]]), torch.tensor([[3, 4]]), 2)
        0.5
    """
    targets = _check("precision_at_k", ids, targets, empty)
    k = _check_k("precision_at_k", k, ids.shape[1])
    return _mean(_hits(ids, targets)[:, :k].sum(1).double() / k, _count(targets), empty)


def recall_at_k(ids: Tensor, targets: Tensor, k: int, *, empty: str = "skip") -> float:
    """Share of the targets that are among the first k, mean over rows. Divided by the number of targets, also above k.

    Args:
        ids: int64 [N, K], best first.
        targets: int64 [N], or [N, P] padded with -100.
        k: at most K.
        empty: "skip" or "zero": rows without a target.

    Example:
        >>> import torch
        >>> from samplex_cuda import metrics
        >>> metrics.recall_at_k(torch.tensor([[4, 1, 3]]), torch.tensor([[3, 4, 7, 8]]), 3)
        0.5
    """
    targets = _check("recall_at_k", ids, targets, empty)
    k = _check_k("recall_at_k", k, ids.shape[1])
    count = _count(targets)
    return _mean(_hits(ids, targets)[:, :k].sum(1) / count.clamp(min=1), count, empty)


def ndcg_at_k(ids: Tensor, targets: Tensor, k: int, *, empty: str = "skip") -> float:
    """Normalized discounted gain: sum of 1 / log2(rank + 1) over hits among the first k, divided by its largest value.

    The largest value has min(k, number of targets) hits at the first ranks.

    Args:
        ids: int64 [N, K], best first.
        targets: int64 [N], or [N, P] padded with -100.
        k: at most K.
        empty: "skip" or "zero": rows without a target.

    Example:
        >>> import torch
        >>> from samplex_cuda import metrics
        >>> metrics.ndcg_at_k(torch.tensor([[4, 1, 3]]), torch.tensor([3]), 3)
        0.5
    """
    targets = _check("ndcg_at_k", ids, targets, empty)
    k = _check_k("ndcg_at_k", k, ids.shape[1])
    count = _count(targets)
    return _mean(_ndcg_rows(_hits(ids, targets), count, k), count, empty)


def mrr(ids: Tensor, targets: Tensor, *, empty: str = "skip") -> float:
    """Mean of 1 / rank of the first target; 0 for a row with none among its K ids.

    Args:
        ids: int64 [N, K], best first.
        targets: int64 [N], or [N, P] padded with -100.
        empty: "skip" or "zero": rows without a target.

    Example:
        >>> import torch
        >>> from samplex_cuda import metrics
        >>> metrics.mrr(torch.tensor([[4, 1], [2, 0]]), torch.tensor([1, 3]))
        0.25
    """
    targets = _check("mrr", ids, targets, empty)
    return _mean(_reciprocal_rank(_hits(ids, targets)), _count(targets), empty)


def _reciprocal_rank(hits: Tensor) -> Tensor:
    ranks = torch.arange(1, hits.shape[1] + 1, dtype=torch.float64, device=hits.device)
    return (hits / ranks).amax(1) if hits.shape[1] else ranks.new_zeros(hits.shape[0])


def accuracy(ids: Tensor, targets: Tensor, *, empty: str = "skip") -> float:
    """Share of rows whose first id is a target (any of them, where there are several).

    Args:
        ids: int64 [N, K], best first; or [N].
        targets: int64 [N], or [N, P] padded with -100.
        empty: "skip" or "zero": rows without a target.

    Example:
        >>> import torch
        >>> from samplex_cuda import metrics
        >>> metrics.accuracy(torch.tensor([4, 2]), torch.tensor([4, 3]))
        0.5
    """
    ids = ids.unsqueeze(1) if isinstance(ids, Tensor) and ids.dim() == 1 else ids
    targets = _check("accuracy", ids, targets, empty)
    _check_k("accuracy", 1, ids.shape[1])
    return _mean(_hits(ids[:, :1], targets)[:, 0].double(), _count(targets), empty)


def propensities(counts: Tensor, num_examples: int, a: float = 0.55, b: float = 1.5) -> Tensor:
    """How likely a true label of each class is to be in the data: the model of Jain, Prabhu and Varma (2016).

    p_l = 1 / (1 + C * exp(-a * log(n_l + b))) with C = (log N - 1) * (b + 1)^a. The defaults are theirs for most data;
    they use a = 0.5, b = 0.4 for Wikipedia and a = 0.6, b = 2.6 for Amazon data.

    Args:
        counts: [C], training examples of each class (`Dataset.class_counts`).
        num_examples: N, of the training data.
        a: A of the paper.
        b: B of the paper.

    Returns:
        fp64 [C], in (0, 1].

    Example:
        >>> import torch
        >>> from samplex_cuda import metrics
        >>> p = metrics.propensities(torch.tensor([1000, 1]), num_examples=10_000)
        >>> bool(p[0] > p[1])
        True
    """
    if not isinstance(counts, Tensor) or counts.dim() != 1:
        raise ValueError(f"propensities: counts must be [C], got {describe(counts)}")
    check_dense("propensities", "counts", counts)
    check_int("propensities", "num_examples", num_examples, 1, 1 << 62)
    a, b = check_number("propensities", "a", a, -100.0, 100.0), check_number("propensities", "b", b, 0.0, open_low=True)
    # Below e examples the constant would be negative and p above 1.
    factor = max(0.0, math.log(num_examples) - 1.0) * (b + 1.0) ** a
    return 1.0 / (1.0 + factor * torch.exp(-a * torch.log(counts.double() + b)))


def psp_at_k(ids: Tensor, targets: Tensor, k: int, propensities: Tensor, *, normalised: bool = True) -> float:
    """Propensity-scored precision: a hit of class l counts 1 / p_l, so that rare classes count more.

    The raw form is the mean over rows of (sum of 1 / p over the hits among the first k) / k; it may exceed 1. The
    normalized form, which the Extreme Classification repository reports, divides its sum over all rows by the largest
    sum that any ranking could have: a ratio of sums, not a mean of ratios. Rows without a target add nothing to either.

    Args:
        ids: int64 [N, K], best first.
        targets: int64 [N], or [N, P] padded with -100.
        k: at most K.
        propensities: [C], see `propensities`.
        normalised: which form.

    Example:
        >>> import torch
        >>> from samplex_cuda import metrics
        >>> p = torch.tensor([0.5, 0.25, 1.0])
        >>> ids, targets = torch.tensor([[0, 2]]), torch.tensor([[0, 1]])
        >>> metrics.psp_at_k(ids, targets, 1, p), metrics.psp_at_k(ids, targets, 1, p, normalised=False)
        (0.5, 2.0)
    """
    targets = _check("psp_at_k", ids, targets)
    k = _check_k("psp_at_k", k, ids.shape[1])
    inverse = _inverse("psp_at_k", propensities, ids.device)
    for name, t in (("ids", ids), ("targets", targets)):
        outside = (t >= inverse.shape[0]) | ((t < 0) if name == "ids" else (t < 0) & (t != PAD))
        if bool(outside.any()):
            got = int(t[outside][0])
            raise IndexError(f"psp_at_k: {name} must be in [0, {inverse.shape[0]}), as many as propensities, got {got}")
    gain, best = _psp_rows(ids, targets, _hits(ids, targets), inverse, k)
    if normalised:
        return float(gain.sum()) / float(best.sum()) if float(best.sum()) > 0 else math.nan
    return _mean(gain / k, _count(targets), "skip")


def _inverse(where: str, propensities: Tensor, device: torch.device) -> Tensor:
    if not isinstance(propensities, Tensor) or propensities.dim() != 1 or not propensities.is_floating_point():
        raise ValueError(f"{where}: propensities must be [C] floating point, got {describe(propensities)}")
    check_dense(where, "propensities", propensities)
    if not bool((propensities > 0).all()):
        raise ValueError(f"{where}: propensities must be above 0, got {float(propensities.min())}")
    return propensities.double().to(device).reciprocal()


def perplexity(nll: float) -> float:
    """exp of a mean NLL in nats; inf where that overflows.

    Example:
        >>> from samplex_cuda import metrics
        >>> metrics.perplexity(0.0)
        1.0
    """
    if isinstance(nll, bool) or not isinstance(nll, int | float | Tensor):
        raise TypeError(f"perplexity: nll must be a number, got {describe(nll)}")
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


# ------------------------------------------------------------------------------------------------ streaming
class Evaluator:
    """All metrics over batches that come one after the other; holds a few sums.

    Args:
        k: the k's of precision, recall, nDCG and PSP.
        propensities: [C]; PSP is left out without them.
        empty: "skip" or "zero": rows without a target.

    Example:
        >>> import torch
        >>> from samplex_cuda import metrics
        >>> evaluator = metrics.Evaluator(k=(1, 2))
        >>> evaluator.update(torch.tensor([[4, 1], [2, 0]]), torch.tensor([1, 2]), nll=torch.tensor([1.0, 3.0]))
        >>> found = evaluator.compute()
        >>> found["accuracy"], found["recall@2"], found["nll"]
        (0.5, 1.0, 2.0)
    """

    def __init__(
        self, k: Sequence[int] = (1, 3, 5), propensities: Tensor | None = None, *, empty: str = "skip"
    ) -> None:
        ks = tuple(k)
        if not ks:
            raise ValueError("Evaluator: k must be one or more ints, got none")
        ks = tuple(check_int("Evaluator", "each k", n) for n in ks)
        if empty not in ("skip", "zero"):
            raise ValueError(f"Evaluator: empty must be 'skip' or 'zero', got {empty!r}")
        self.k = tuple(sorted(set(ks)))
        self.empty = empty
        self._inverse = None if propensities is None else _inverse("Evaluator", propensities, torch.device("cpu"))
        self.reset()

    def reset(self) -> None:
        """Forget all batches.

        Example:
            >>> from samplex_cuda import metrics
            >>> evaluator = metrics.Evaluator()
            >>> evaluator.reset()
        """
        self.rows = 0  # all of them
        self.counted = 0  # those with a target
        self._sums: dict[str, float] = {}
        self._nll, self._nll_rows = 0.0, 0

    def totals(self) -> dict[str, float]:
        """The sums so far, for `merge` in another process."""
        counts = {"rows": self.rows, "counted": self.counted, "nll": self._nll, "nll_rows": self._nll_rows}
        return {**self._sums, **counts}

    def merge(self, parts: Sequence[dict[str, float]]) -> None:
        """Add the batches of other evaluators, by their `totals`.

        Example:
            >>> import torch
            >>> from samplex_cuda import metrics
            >>> one, other = metrics.Evaluator(k=(1,)), metrics.Evaluator(k=(1,))
            >>> other.update(torch.tensor([[4]]), torch.tensor([4]), nll=torch.tensor([2.0]))
            >>> one.merge([other.totals()])
            >>> one.compute()["nll"]
            2.0
        """
        for part in map(dict, parts):
            self.rows += int(part.pop("rows"))
            self.counted += int(part.pop("counted"))
            self._nll += part.pop("nll")
            self._nll_rows += int(part.pop("nll_rows"))
            for name, value in part.items():
                self._sums[name] = self._sums.get(name, 0.0) + value

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.sum())

    def update(self, ids: Tensor, targets: Tensor, nll: Tensor | None = None, *, ranks: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            ids: int64 [N, K], best first, K at least the largest k.
            targets: int64 [N], or [N, P] padded with -100.
            nll: [N], of each row; rows without a target are left out. Either all batches have it or none.
            ranks: int64 [N], the rank of the first hit among all classes, 0 for none, for an MRR that does not end with
                the columns of ids.

        Example:
            >>> import torch
            >>> from samplex_cuda import metrics
            >>> evaluator = metrics.Evaluator(k=(1,))
            >>> evaluator.update(torch.tensor([[4]]), torch.tensor([4]))
            >>> evaluator.compute()["precision@1"]
            1.0
        """
        targets = _check("Evaluator.update", ids, targets)
        if ids.shape[1] < self.k[-1]:
            raise ValueError(f"Evaluator.update: ids must have at least {self.k[-1]} columns, got {describe(ids)}")
        if nll is not None and (nll.shape != ids.shape[:1] or not nll.is_floating_point()):
            raise ValueError(f"Evaluator.update: nll must be [{ids.shape[0]}] floating point, got {describe(nll)}")
        if ranks is not None and (ranks.shape != ids.shape[:1] or ranks.dtype != torch.int64):
            raise ValueError(f"Evaluator.update: ranks must be [{ids.shape[0]}] int64, got {describe(ranks)}")
        if (nll is None) != (self._nll_rows < 0) and self.rows:
            raise ValueError("Evaluator.update: nll must be given for all batches or for none")
        ids, targets = ids.cpu(), targets.cpu()
        count, hits = _count(targets), _hits(ids, targets)
        self.rows += ids.shape[0]
        self.counted += int((count > 0).sum())
        for k in self.k:
            found = hits[:, :k].sum(1).double()
            self._add(f"precision@{k}", found / k)
            self._add(f"recall@{k}", found / count.clamp(min=1))
            self._add(f"ndcg@{k}", _ndcg_rows(hits, count, k))
            if self._inverse is not None:
                gain, best = _psp_rows(ids, targets, hits, self._inverse, k)
                self._add(f"gain@{k}", gain)
                self._add(f"best@{k}", best)
        if ranks is None:
            self._add("mrr", _reciprocal_rank(hits))
        else:
            ranks = ranks.cpu()
            self._add("mrr", torch.where((ranks > 0) & (count > 0), 1.0 / ranks.clamp(min=1).double(), 0.0))
        self._add("accuracy", hits[:, 0].double())
        if nll is None:
            self._nll_rows = -1
        else:
            valid = count > 0
            self._nll += float(nll.detach().cpu().double()[valid].sum())
            self._nll_rows += int(valid.sum())

    def compute(self) -> dict[str, float]:
        """The metrics of all batches so far.

        Returns:
            "precision@k", "recall@k", "ndcg@k" for each k, with propensities "psp@k" (normalized) and "psp_raw@k";
            "mrr" (over all columns of ids, or by `ranks`), "accuracy"; with nll "nll" (mean over rows with a target)
            and "perplexity".

        Example:
            >>> from samplex_cuda import metrics
            >>> sorted(metrics.Evaluator(k=(1,)).compute())
            ['accuracy', 'mrr', 'ndcg@1', 'precision@1', 'recall@1']
        """
        rows = self.counted if self.empty == "skip" else self.rows

        def mean(name: str) -> float:
            return self._sums.get(name, 0.0) / rows if rows else math.nan

        found = {}
        for k in self.k:
            for name in ("precision", "recall", "ndcg"):
                found[f"{name}@{k}"] = mean(f"{name}@{k}")
            if self._inverse is not None:
                best = self._sums.get(f"best@{k}", 0.0)
                found[f"psp@{k}"] = self._sums[f"gain@{k}"] / best if best else math.nan
                found[f"psp_raw@{k}"] = mean(f"gain@{k}") / k
        found["mrr"], found["accuracy"] = mean("mrr"), mean("accuracy")
        if self._nll_rows > 0:
            found["nll"] = self._nll / self._nll_rows
            found["perplexity"] = perplexity(found["nll"])
        return found


@torch.no_grad()
def evaluate(
    encoder: nn.Module | Callable[[dict[str, Tensor]], Tensor],
    head: SampledClassifier,
    dataset: Dataset,
    batch_size: int = 256,
    *,
    k: Sequence[int] = (1, 3, 5),
    exclude_history: bool = False,
    propensities: Tensor | None = None,
    empty: str = "skip",
    nll: bool = True,
    max_rows: int | None = None,
) -> dict[str, float]:
    """Exact metrics of a model over a data set: the k best of all classes, and the NLL of the full softmax in chunks.

    Encoder and head are put in eval mode and back; a state that the encoder carries from batch to batch begins again
    and is put back (`carried` and `carry` of `samplex_cuda.training` encoders).

    Args:
        encoder: batch -> h [B, d], or [B, T, d] for text. Where it has `encode`, that gives (h, features).
        head: the classifier.
        dataset: what to measure on, in its own order.
        batch_size: rows at a time; text has its own.
        k: as in `Evaluator`; those above C are C.
        exclude_history: leave known items (`Interactions.seen`) out of the ranking: a recommendation is new. A target
            that is a known item is then a miss. The NLL is over all classes all the same.
        propensities: [C], for PSP.
        empty: as in `Evaluator`.
        nll: whether the NLL is computed.
        max_rows: only so many first rows, in whole batches.

    Returns:
        As `Evaluator.compute`.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> from samplex_cuda import data, metrics
        >>> whole = data.Dense(torch.randn(50, 8), torch.randint(0, 20, (50,)), num_classes=20)
        >>> head = sx.SampledClassifier(8, 20, sx.samplers.Uniform(20), num_samples=5)
        >>> found = metrics.evaluate(lambda batch: batch["x"], head, whole, k=(1, 20))
        >>> found["recall@20"], found["accuracy"] == found["precision@1"]
        (1.0, True)
    """
    from samplex_cuda.data import Batches

    model: Any = encoder
    source: Any = dataset
    ks = tuple(sorted({min(n, head.num_classes) if isinstance(n, int) else n for n in k}))
    evaluator = Evaluator(ks, propensities, empty=empty)
    if exclude_history and dataset.kind != "interactions":
        raise ValueError(f"evaluate: exclude_history needs interactions, got {dataset.kind} data")
    size = source.columns if dataset.ordered else batch_size
    batches = Batches(dataset, size, shuffle=False)
    count = len(batches) if max_rows is None else min(len(batches), math.ceil(max_rows / size))
    device = head.weight.device
    is_module, carries = isinstance(model, nn.Module), hasattr(model, "carried")
    was = (model.training if is_module else False, head.training, head.reduction)
    carried = model.carried() if carries else None
    try:
        if is_module:
            model.eval()
        nn.Module.train(head, False)  # not head.eval(): going back would count as a new epoch for its sampler
        head.reduction = "none"
        if carries:
            model.carry({})
        for number in range(count):
            rows = batches.rows(number)
            batch = {name: t.to(device) for name, t in dataset.batch(rows).items()}
            h, features = model.encode(batch) if hasattr(model, "encode") else (model(batch), None)
            y = batch["y"]
            several = y.dim() == h.dim()
            h = h.to(head.weight.dtype).reshape(-1, h.shape[-1])
            y = y.reshape(-1, y.shape[-1]) if several else y.reshape(-1)
            features = None if features is None else features.reshape(-1, features.shape[-1])
            keep = (y != PAD).any(1) if several else y != PAD
            if empty == "skip" and not exclude_history and not bool(keep.all()):
                # Not worth a ranking: the fill of a last window, rows without labels.
                h, y = h[keep], y[keep]
                features = None if features is None else features[keep]
            loss = head(h, y, features=features) if nll and len(h) else h.new_zeros(len(h)) if nll else None
            if exclude_history:
                ids = _topk_without(head, h, features, ks[-1], *source.seen(rows))
            elif len(h):
                ids = head.topk(h, ks[-1], features=features)[1]
            else:
                ids = y.new_zeros(0, ks[-1])
            finite = h.isfinite().all(1)
            if not bool(finite.all()):
                ids = torch.where(finite[:, None], ids, -1)  # classes of a nan row would be arbitrary
            evaluator.update(ids, y, loss)
    finally:
        if is_module:
            model.train(was[0])
        nn.Module.train(head, was[1])
        head.reduction = was[2]
        if carries:
            model.carry(carried)
    return evaluator.compute()


def _topk_without(
    head: SampledClassifier, h: Tensor, features: Tensor | None, k: int, offsets: Tensor, seen: Tensor
) -> Tensor:
    """The k best classes of each row that are not among its CSR (offsets, seen), -1 where fewer are left."""
    found = []
    step = max(1, _SCORES // head.num_classes)
    for begin in range(0, len(h), step):
        end = min(begin + step, len(h))
        scores = head.scores(h[begin:end], None if features is None else features[begin:end])
        ends = offsets[begin : end + 1]
        row = torch.repeat_interleave(torch.arange(end - begin), ends.diff())
        scores[row.to(h.device), seen[ends[0] : ends[-1]].to(h.device)] = -torch.inf
        values, ids = _stable_topk(scores, k)
        found.append(torch.where(values == -torch.inf, -1, ids))
    return torch.cat(found) if found else torch.empty(0, k, dtype=torch.int64)


def _first_ranks(
    head: SampledClassifier, h: Tensor, y: Tensor, features: Tensor | None, known: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The rank of the first target of each row among all classes, int64 [N]; ties to the lower id, 0 for none.

    y: [N], or [N, P] padded with a number below 0. `known`: CSR (offsets, ids) of classes that are not answers.
    """
    y = y.reshape(len(h), -1)
    found = torch.zeros(len(h), dtype=torch.int64, device=h.device)
    step = max(1, _SCORES // head.num_classes)
    order = torch.arange(head.num_classes, device=h.device)
    for begin in range(0, len(h), step):
        part = slice(begin, begin + step)
        scores = head.scores(h[part], None if features is None else features[part])
        if known is not None:
            ends = known[0][begin : begin + len(scores) + 1]
            row = torch.repeat_interleave(torch.arange(len(scores)), ends.diff())
            scores[row.to(h.device), known[1][ends[0] : ends[-1]].to(h.device)] = -torch.inf
        own = scores.gather(1, y[part].clamp(min=0)).masked_fill(y[part] < 0, -torch.inf)
        best = own.amax(1, keepdim=True)
        first = torch.where(own == best, y[part], head.num_classes).amin(1, keepdim=True)
        before = (scores > best) | ((scores == best) & (order < first))
        found[part] = torch.where(best[:, 0] > -torch.inf, before.sum(1) + 1, 0)
    return found
