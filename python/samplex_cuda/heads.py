"""`SampledClassifier`: the module that takes the place of `nn.Linear(d, C)` + `nn.CrossEntropyLoss`.

In training a step costs O(num_samples) per row, whatever C is; in evaluation the answers are exact and cost O(C).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from samplex_cuda import functional
from samplex_cuda.draw import Draw
from samplex_cuda.fusion import Fusion
from samplex_cuda.prediction import (
    Prior,
    _describe,
    exact_log_prob,
    exact_nll,
    exact_scores,
    exact_topk,
    mean_weight,
    rerank,
    valid_targets,
)
from samplex_cuda.samplers.tree import Tree
from samplex_cuda.tables import empty_table

if TYPE_CHECKING:
    from samplex_cuda.index import ClassIndex
    from samplex_cuda.optim import RowOptimizer
    from samplex_cuda.rng import Key

__all__ = ["SampledClassifier", "Staleness"]

_LOSSES = ("sampled_softmax", "negative_sampling", "nce", "one_vs_each", "augment_reduce", "full_softmax")
_NOISE_LOSSES = ("negative_sampling", "nce")  # every draw counts, hits too
_WEIGHTED_LOSSES = ("sampled_softmax", "one_vs_each", "augment_reduce")  # a draw weighs 1 / (m q)
_REDUCTIONS = ("mean", "sum", "none")


class Staleness(NamedTuple):
    """How far a sampler that follows the class table lags behind it.

    Attributes:
        steps: training forwards since the sampler was last brought up to date.
        rows: class rows that may have changed since then; -1 where nothing is known (all of them).

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> head.staleness()
        Staleness(steps=0, rows=0)
    """

    steps: int
    rows: int


class SampledClassifier(nn.Module):
    """A linear classifier over C classes that trains on sampled classes and evaluates exactly.

    In training mode `head(h, y)` draws `num_samples` classes per row (or once for the batch, with `shared=True`) and
    returns the sampled loss; gradients reach only the rows that were touched. In eval mode `head(h, y)` is the exact
    negative log-likelihood over all classes, computed in chunks, without gradient.

    With `loss="negative_sampling"` (Bamler & Mandt 2020) the scores are learned relative to the sampler's law p_n, so
    evaluation and prediction add log p_n(y|x) back (Eq. 5) by themselves: the NLL, `log_prob`, `predict`, `topk` and
    `scores`. The sampler then belongs to the model: keep it with the weights, and keep it fixed, or later predictions
    are corrected by another law than the one the scores were learned against.

    `weight` [C, d] and `bias` [C] have the names, shapes and initial values of `nn.Linear(d, C)`:

    - `head.load_state_dict(linear.state_dict())` works as it is: a checkpoint that says nothing of the sampler leaves
      the sampler as it is;
    - `head.linear()` is an `nn.Linear` that shares the parameters; its `state_dict()` holds nothing else.

    The sampler is a submodule: `state_dict()` keeps its state under `sampler.`, and `.to(device)` moves it.

    Args:
        in_features: d, the width of `h`.
        num_classes: C.
        sampler: where negatives come from, for the same C. May be left out with "full_softmax".
        num_samples: draws per row, or per batch with `shared=True`. Not used by "full_softmax".
        loss: "sampled_softmax", "negative_sampling", "nce", "one_vs_each", "augment_reduce", or "full_softmax": exact,
            O(C) a row, with dense gradients. docs/losses.md compares them.
        bias: whether there is a bias per class.
        shared: draw once for the whole batch. Targets among the draws are then masked, where per-row draws exclude
            them beforehand; both leave the expected normaliser right. (Negative sampling and NCE do neither.) A sampler
            with a law for each row draws from the mean of these laws. On the CPU classes that were drawn more than
            once are computed once (`Draw.merged`): many draws from a law with a short head are cheap.
        stratified: shared draws in strata instead of independent ones (`Tree.sample`): the same expectation with less
            noise, so that fewer draws do. For a `Tree`, and for losses that are sums over weighted draws, so not for
            negative sampling and NCE.
        scale: inverse temperature; the logit is `scale * (h @ w + b)`.
        absolute: the logit is `|scale * (h @ w + b)|` (for samplers that favour large absolute logits).
        label_smoothing: as in `F.cross_entropy`, over the target and the draws; training only.
        reg: lambda of Eq. 6, for negative sampling: pulls the corrected scores to zero.
        num_examples: how many training examples there are, for augment_reduce: it keeps log eta of each (`log_eta`
            [num_examples], at least fp32, in `state_dict()`), and `forward` needs their `index`.
        eta_rate: rho in (0, 1], for augment_reduce: a training forward moves the eta it has used to
            `(1 - rho) * eta + rho * R`, R the estimated sum of the example. All start at C, the sum where all scores
            are equal. An example that stands twice in a batch keeps the larger result.
        class_weight: [C], as `weight` of `F.cross_entropy`. It moves with the module, keeps at least fp32 and is not
            part of `state_dict()`.
        ignore_index: rows of this target have no loss and no gradient.
        sparse: give `weight` and `bias` sparse COO gradients (`torch.optim.SGD`, `Adagrad` and `SparseAdam` take
            them); otherwise dense ones, which cost O(C) per step.
        reduction: "mean", "sum" or "none".
        sampler_update: how a sampler that depends on the class table (`Quadratic`, `RandomFourier`) follows it.
            "step": before each training forward it is told the rows that the last one touched; an int k: every k
            forwards; "epoch": it is rebuilt whenever the head goes from eval to training mode; None: never, the caller
            does it; "auto": "step" where the sampler depends on the table, else None. Where there is a policy, the
            first forward rebuilds. Only rows that a forward touched count as changed, so dense weight decay or momentum
            needs "epoch" or an own `sampler.rebuild` now and then. See `staleness` and `update_sampler`.
        device: where the parameters live.
        dtype: of the parameters.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(16, 1000, sampler=sx.samplers.LogUniform(1000), num_samples=20)
        >>> h, y = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> loss = head(h, y)  # sampled
        >>> loss.backward()
        >>> head.weight.grad.is_sparse
        True
        >>> nll = head.eval()(h, y)  # exact
        >>> logits, ids = head.topk(h, 5)
        >>> ids.shape
        torch.Size([8, 5])
    """

    class_weight: Tensor | None
    log_eta: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        sampler: nn.Module | None = None,
        num_samples: int | None = None,
        loss: str = "sampled_softmax",
        bias: bool = True,
        *,
        shared: bool = False,
        stratified: bool = False,
        scale: float = 1.0,
        absolute: bool = False,
        label_smoothing: float = 0.0,
        reg: float = 0.0,
        num_examples: int | None = None,
        eta_rate: float = 0.5,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        sparse: bool = True,
        reduction: str = "mean",
        sampler_update: str | int | None = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = [("in_features", in_features), ("num_classes", num_classes), ("num_samples", num_samples)]
        if loss == "full_softmax":
            sizes.pop()  # it draws nothing; a sampler may be there all the same, e.g. a tree for `topk`
            num_samples = 0
        for name, value in sizes:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"SampledClassifier: {name} must be an int of at least 1, got {value!r}")
        if loss not in _LOSSES:
            raise ValueError(f"SampledClassifier: loss must be one of {', '.join(_LOSSES)}, got {loss!r}")
        if reduction not in _REDUCTIONS:
            raise ValueError(f"SampledClassifier: reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
        without = sampler is None and loss == "full_softmax"
        if not without and (not isinstance(sampler, nn.Module) or not hasattr(sampler, "sample")):
            raise TypeError(f"SampledClassifier: sampler must be a sampler of samplex_cuda.samplers, got {sampler!r}")
        of_sampler: Any = getattr(sampler, "num_classes", num_classes)
        if of_sampler != num_classes:
            raise ValueError(f"SampledClassifier: sampler must have num_classes = {num_classes}, got {of_sampler}")
        if sampler_update == "auto":
            # Scores of negative sampling are relative to the law they were learned against: that sampler must rest.
            follows = getattr(sampler, "follows_rows", False) and loss not in ("negative_sampling", "full_softmax")
            sampler_update = "step" if follows else None
        counts = isinstance(sampler_update, int) and not isinstance(sampler_update, bool) and sampler_update >= 1
        if not (counts or sampler_update in ("step", "epoch", None)):
            raise ValueError(
                "SampledClassifier: sampler_update must be 'auto', 'step', an int of at least 1, 'epoch' or None, got "
                f"{sampler_update!r}"
            )
        if sampler_update is not None and loss == "negative_sampling":
            raise ValueError(
                "SampledClassifier: sampler_update must be None with loss='negative_sampling', whose sampler belongs "
                f"to the model, got {sampler_update!r}"
            )
        if shared and loss == "negative_sampling" and getattr(sampler, "conditional", False):
            raise ValueError(
                "SampledClassifier: shared must be False with loss='negative_sampling' and a sampler with a law for "
                "each row: scores would be relative to the law of a batch, which prediction does not know; got True"
            )
        if stratified and not (shared and getattr(sampler, "stratifies", False) and loss in _WEIGHTED_LOSSES):
            raise ValueError(
                "SampledClassifier: stratified must be False but with shared=True, a Tree and one of "
                f"{', '.join(_WEIGHTED_LOSSES)}; got True with shared={shared!r}, {type(sampler).__name__} and {loss!r}"
            )
        if getattr(sampler, "follows_rows", False) and getattr(sampler, "has_bias", False) and not bias:
            raise ValueError("SampledClassifier: bias must be True with a sampler that has a bias, got False")
        if not math.isfinite(scale):
            raise ValueError(f"SampledClassifier: scale must be finite, got {scale!r}")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"SampledClassifier: label_smoothing must be in [0, 1], got {label_smoothing!r}")
        if not 0.0 <= reg < math.inf:
            raise ValueError(f"SampledClassifier: reg must be finite and at least 0, got {reg!r}")
        if loss not in ("sampled_softmax", "full_softmax"):
            for name, given in (("absolute", absolute), ("label_smoothing", label_smoothing)):
                if given:
                    raise ValueError(f"SampledClassifier: {name} must be off with loss={loss!r}, got {given!r}")
        if reg and loss != "negative_sampling":
            raise ValueError(f"SampledClassifier: reg must be 0 with loss={loss!r}, got {reg!r}")
        if loss == "augment_reduce":
            if isinstance(num_examples, bool) or not isinstance(num_examples, int) or num_examples < 1:
                raise ValueError(
                    "SampledClassifier: num_examples must be an int of at least 1 with loss='augment_reduce', got "
                    f"{num_examples!r}"
                )
            if not 0.0 < eta_rate <= 1.0:
                raise ValueError(f"SampledClassifier: eta_rate must be in (0, 1], got {eta_rate!r}")
        elif num_examples is not None:
            raise ValueError(f"SampledClassifier: num_examples must be None with loss={loss!r}, got {num_examples!r}")
        if class_weight is not None and (
            class_weight.shape != (num_classes,) or not class_weight.dtype.is_floating_point
        ):
            raise ValueError(
                f"SampledClassifier: class_weight must be [{num_classes}] float32, got {_describe(class_weight)}"
            )
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"SampledClassifier: dtype must be floating point, got {dtype}")

        self.in_features = in_features
        self.num_classes = num_classes
        self.num_samples = num_samples or 0
        self.loss = loss
        self.shared = shared
        self.stratified = stratified
        self.scale = float(scale)
        self.absolute = absolute
        self.label_smoothing = float(label_smoothing)
        self.reg = float(reg)
        self.ignore_index = ignore_index
        self.sparse = sparse
        self.reduction = reduction
        self.weight = nn.Parameter(empty_table(num_classes, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.sampler = sampler
        self.sampler_update: str | int | None = sampler_update
        self._touched: list[Tensor] = []  # ids since the sampler was brought up to date
        self._steps = 0  # training forwards since then
        self._stale = True  # the sampler has never seen this table, or an older one
        self._fusion: Fusion | None = None
        self.register_state_dict_pre_hook(_flush_sampler)
        if class_weight is not None:
            class_weight = class_weight.detach().to(device=self.weight.device, dtype=self._wide())
        # Not persistent: a checkpoint holds what nn.Linear's does.
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.eta_rate = float(eta_rate)
        log_eta = None
        if num_examples is not None:
            log_eta = torch.full((num_examples,), math.log(num_classes), device=self.weight.device, dtype=self._wide())
        self.register_buffer("log_eta", log_eta)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values of `nn.Linear`: the same bits after the same `torch.manual_seed`."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1.0 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self,
        h: Tensor,
        y: Tensor,
        *,
        features: Tensor | None = None,
        index: Tensor | None = None,
        context: Any = None,
        sample_weight: Tensor | None = None,
        positives: tuple[Tensor, Tensor] | None = None,
        key: Key | Tensor | None = None,
    ) -> Tensor:
        """Sampled loss in training mode, exact NLL in eval mode.

        Args:
            h: [*, d].
            y: int64 [*], or [*, P] for several targets per row, padded with -100.
            features: [*, f], what the sampler looks at where that is not `h`.
            index: int64 [*], example numbers in [0, num_examples), for augment_reduce; others ignore it.
            context: what context-dependent samplers need; others ignore it.
            sample_weight: [*], multiplies the loss of each row; "mean" divides by the sum of the weights.
            positives: CSR pair (offsets int64 [B + 1], ids int64): further known positives of each row, never counted
                as negatives in training. The exact NLL of eval mode ignores them.
            key: where the draw comes from, a `Key` or its reserved tensor; by default torch's generator.

        Returns:
            fp32 scalar, or [*] with `reduction="none"` (fp64 with fp64 parameters).

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10, reduction="none")
            >>> head(torch.randn(2, 3, 4), torch.randint(50, (2, 3))).shape
            torch.Size([2, 3])
        """
        lead = self._check_h("forward", h)
        if self._fusion is not None and self.training and not torch.compiler.is_compiling():
            usual = features is None and context is None and positives is None and sample_weight is None
            if usual and (loss := self._fusion.plain_loss(h, y, key)) is not None:
                return loss
        if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.shape[: len(lead)] != lead or y.dim() > h.dim():
            want = ", ".join(str(n) for n in lead)
            several = f"{want}, P" if want else "P"
            raise ValueError(f"SampledClassifier: y must be [{want}] or [{several}] int64 to fit h, got {_describe(y)}")
        if sample_weight is not None and (sample_weight.shape != lead or not sample_weight.is_floating_point()):
            raise ValueError(
                f"SampledClassifier: sample_weight must be {list(lead)} floating point, got {_describe(sample_weight)}"
            )
        if y.dim() > len(lead) and y.shape[-1] == 0:
            raise ValueError(f"SampledClassifier: y must have at least one target a row, got {_describe(y)}")
        self._check_features("forward", features, lead)
        if positives is not None and self.loss in _NOISE_LOSSES:
            raise ValueError(
                f"SampledClassifier: positives must be None with loss={self.loss!r}, which counts every draw; got "
                f"{_describe(positives)}"
            )
        if self.loss == "augment_reduce" and self.training:
            self._check_index(index, lead)
        # A reshape to the same shape would be a view, and one more node for autograd to visit.
        rows = h if h.dim() == 2 else h.reshape(-1, self.in_features)
        target = y if len(lead) == 1 else y.reshape(rows.shape[0], *y.shape[len(lead) :])
        if self.training:
            # The reduction is left to the op unless rows are weighted here.
            reduction = "none" if sample_weight is not None else self.reduction
            if self.loss == "full_softmax":
                loss = self._full_loss(rows, target, reduction)
            else:
                run: Any = type(self)._sampled_loss
                if self._fusion is not None and torch.compiler.is_compiling():
                    # A fused optimizer works inside eager autograd: a compiled caller leaves its graph here.
                    from samplex_cuda._eager import eager_loss as run
                loss = run(self, rows, target, features, index, context, positives, key, reduction)
            if sample_weight is None:
                return loss.reshape(lead) if reduction == "none" else loss
            row_weight = self._row_weight(target)
        else:
            loss = exact_nll(
                rows,
                self.weight,
                target,
                self.bias,
                scale=self.scale,
                absolute=self.absolute,
                class_weight=self.class_weight,
                ignore_index=self.ignore_index,
                prior=self._prior(rows, features),
            )
            row_weight = self._row_weight(target)
        if sample_weight is not None:
            flat = sample_weight.reshape(-1).to(loss.dtype)
            loss = loss * flat
            row_weight = row_weight * flat
        if self.reduction == "none":
            return loss.reshape(lead)
        if self.reduction == "sum":
            return loss.sum()
        total = row_weight.sum().to(loss.dtype)
        return loss.sum() / torch.where(total == 0, 1.0, total)

    def _full_loss(self, h: Tensor, target: Tensor, reduction: str) -> Tensor:
        return functional.full_softmax(
            h,
            self.weight,
            target,
            self.bias,
            scale=self.scale,
            reduction=reduction,
            absolute=self.absolute,
            label_smoothing=self.label_smoothing,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
        )

    def _sampled_loss(
        self,
        h: Tensor,
        target: Tensor,
        features: Tensor | None,
        index: Tensor | None,
        context: Any,
        positives: tuple[Tensor, Tensor] | None,
        key: Key | Tensor | None,
        reduction: str,
    ) -> Tensor:
        if self.sampler_update is not None:
            self._follow()
        with torch.no_grad():
            seen = self._seen(h, features)
            noise = self.loss in _NOISE_LOSSES
            exclude = None if self.shared or noise else self._excluded(target)
            sampler: Any = self.sampler
            common = {"shared": self.shared, "key": key, "context": context}
            target_log_q = None
            if self.loss == "nce" or (noise and self.reg):
                known = torch.where(self._valid(target), target, 0)
                draw, target_log_q = sampler.sample_and_score(seen, self.num_samples, known, **common)
            elif self.shared and not noise:
                draw = self._draw_shared(seen, key, context)
            else:
                draw = sampler.sample(seen, self.num_samples, exclude=exclude, **common)
            if self.sampler_update is not None:
                self._steps += 1
                if self.sampler_update != "epoch":
                    self._touched += [target[self._valid(target)].detach(), draw.ids.reshape(-1)]
        options: dict[str, Any] = {
            "bias": self.bias,
            "scale": self.scale,
            "reduction": reduction,
            "class_weight": self.class_weight,
            "ignore_index": self.ignore_index,
            "sparse": self.sparse,
        }
        drawn = (h, self.weight, target, draw.ids, draw.log_q)
        if self.loss == "negative_sampling":
            return functional.negative_sampling(*drawn, target_log_q, reg=self.reg, **options)
        if self.loss == "nce":
            assert target_log_q is not None
            return functional.nce(*drawn, target_log_q, **options)
        if self.loss == "one_vs_each":
            return functional.one_vs_each(*drawn, positives=positives, **options)
        if self.loss == "augment_reduce":
            assert index is not None
            return self._augment_reduce(drawn, index.reshape(-1), positives, options)
        loss = functional.sampled_softmax(
            h,
            self.weight,
            target,
            draw.ids,
            draw.log_q,
            self.bias,
            scale=self.scale,
            reduction=reduction,
            absolute=self.absolute,
            label_smoothing=self.label_smoothing,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            positives=positives,
            sparse=self.sparse,
        )
        assert isinstance(loss, Tensor)  # a pair only with return_lse
        return loss

    def _draw_shared(self, seen: Tensor, key: Key | Tensor | None, context: Any = None) -> Draw:
        """One set of draws for the batch, with each class once where that pays and the loss is the same."""
        sampler: Any = self.sampler
        more = {"stratified": True} if self.stratified else {}
        draw: Draw = sampler.sample(seen, self.num_samples, shared=True, key=key, context=context, **more)
        return draw.merged() if not self.label_smoothing and draw.repeats() else draw

    def _valid(self, target: Tensor) -> Tensor:
        return valid_targets(target, self.ignore_index)

    def _excluded(self, target: Tensor) -> Tensor:
        """Targets with -1 in place of what is ignored."""
        # One small op where two would do it; a negative target that is not ignored is an error of the loss.
        return target.clamp_min(-1) if self.ignore_index < 0 else torch.where(self._valid(target), target, -1)

    def _augment_reduce(
        self,
        drawn: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        index: Tensor,
        positives: tuple[Tensor, Tensor] | None,
        options: dict[str, Any],
    ) -> Tensor:
        assert self.log_eta is not None
        log_eta = self.log_eta[index]
        loss, log_sum = functional.augment_reduce(*drawn, log_eta, positives=positives, return_log_sum=True, **options)
        with torch.no_grad():
            keep = math.log1p(-self.eta_rate) if self.eta_rate < 1.0 else -math.inf
            # One that overflowed counts as the largest that does not; a nan is no news of eta; R is never below 1.
            log_sum = torch.minimum(log_sum, log_eta + 88.0)
            moved = torch.logaddexp(log_eta + keep, log_sum + math.log(self.eta_rate))
            moved = torch.where(log_sum.isnan(), log_eta, moved).clamp_min(0.0)
            # The larger one where an index occurs twice: it does not depend on the order.
            self.log_eta.scatter_reduce_(0, index, moved, "amax", include_self=False)
        return loss

    def _check_index(self, index: Tensor | None, lead: torch.Size) -> None:
        assert self.log_eta is not None
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.shape != lead:
            raise ValueError(
                f"SampledClassifier: index must be {list(lead)} int64 with loss='augment_reduce', got "
                f"{_describe(index)}"
            )
        if index.device != self.log_eta.device:
            raise ValueError(f"SampledClassifier: index must be on {self.log_eta.device}, got {index.device}")
        # On a device a look at the numbers would wait for it; torch's own indexing stops there.
        if index.is_cpu and index.numel() and not torch.compiler.is_compiling():
            low, high = (int(t) for t in index.aminmax())
            count = self.log_eta.shape[0]
            if low < 0 or high >= count:
                got = low if low < 0 else high
                raise IndexError(f"SampledClassifier: index must be in [0, {count}), got {got}")

    # -------------------------------------------------------------------------------------------- the optimizer
    def fuse_optimizer(self, optimizer: RowOptimizer | None, accumulate: int = 1, *, grad_scaler: Any = None) -> None:
        """Let `optimizer` update this head inside backward: no gradient of the class table is ever stored.

        From then on `weight.grad` and `bias.grad` stay None, and `optimizer.step()` has nothing to do. The rate is read
        at each update, so schedulers work; the optimizer of the encoder is untouched. Several losses of this head in
        one backward make one update of their sum. Where the weight gets a gradient from elsewhere too (a tied weight),
        or has changed between a forward and its backward, backward raises. See docs/optim.md.

        Args:
            optimizer: `sx.optim.RowSGD`, `RowAdagrad` or `RowAdam` of this head's parameters and no others; None undoes
                the fusion.
            accumulate: every k-th backward updates, with the gradients of all k summed. Until then ids, coefficients
                and `h` are kept, never [C, d].
            grad_scaler: a `torch.amp.GradScaler` that scales the loss: gradients are divided by its scale, and an
                update with an inf or nan in it is left out. Its `step` and `update` go on with the encoder's optimizer.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
            >>> head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
            >>> before = head.weight.detach().clone()
            >>> head(torch.randn(4, 8), torch.arange(4)).backward()
            >>> head.weight.grad is None, torch.equal(head.weight, before)
            (True, False)
        """
        fusion = None if optimizer is None else Fusion(self, optimizer, accumulate, grad_scaler)
        if self._fusion is not None:
            self._fusion.remove()
        self._fusion = fusion

    def _note_changed(self, ids: list[Tensor]) -> None:
        """Rows that an accumulated update changed after the sampler had been told of them."""
        if self.sampler_update is not None and self.sampler_update != "epoch":
            self._touched += [i[(i >= 0) & (i < self.num_classes)] for i in ids]

    # -------------------------------------------------------------------------------------------- the sampler follows
    def staleness(self) -> Staleness:
        """How many training forwards, and how many class rows, the sampler lags behind `weight`.

        Zero for samplers that do not depend on the table. With `sampler_update=None` nothing is counted.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Quadratic(torch.zeros(100, 8))
            >>> head = sx.SampledClassifier(8, 100, sampler, num_samples=5, bias=False)
            >>> _ = head(torch.randn(4, 8), torch.arange(4))
            >>> stale = head.staleness()
            >>> stale.steps, 4 <= stale.rows <= 24
            (1, True)
        """
        if self.sampler_update is None:
            return Staleness(0, 0)
        if self._stale or (self.sampler_update == "epoch" and self._steps):
            return Staleness(self._steps, -1)
        rows = torch.cat(self._touched).unique().numel() if self._touched else 0
        return Staleness(self._steps, rows)

    @torch.no_grad()
    def update_sampler(self) -> None:
        """Bring the sampler up to date with `weight` and `bias` now: the rows touched since, or all of them.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Quadratic(torch.zeros(100, 8))
            >>> head = sx.SampledClassifier(8, 100, sampler, num_samples=5, bias=False)
            >>> head.update_sampler()
            >>> torch.equal(sampler.rows, head.weight)
            True
        """
        sampler: Any = self.sampler
        with_bias = getattr(sampler, "has_bias", False) and self.bias is not None
        if self._stale or (self.sampler_update == "epoch" and self._steps):
            sampler.rebuild(self.weight, self.bias) if with_bias else sampler.rebuild(self.weight)
        elif self._touched:
            ids = torch.cat(self._touched).unique()
            rows = self.weight[ids]
            sampler.update(ids, rows, self.bias[ids]) if with_bias else sampler.update(ids, rows)
        self._touched, self._steps, self._stale = [], 0, False

    def _follow(self) -> None:
        """What the policy says before a training forward."""
        due = isinstance(self.sampler_update, int) and self._steps >= self.sampler_update
        if self._stale or due or (self.sampler_update == "step" and self._steps > 0):
            self.update_sampler()

    def train(self, mode: bool = True) -> SampledClassifier:
        """As in `nn.Module`; with `sampler_update="epoch"` going from eval to training marks the sampler for a rebuild.

        Example:
            >>> import samplex_cuda as sx
            >>> sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10).train().training
            True
        """
        if mode and not self.training and self.sampler_update == "epoch" and self._steps:
            self._stale = True
        return super().train(mode)

    def _row_weight(self, target: Tensor) -> Tensor:
        """What a row counts in a mean, [B]: the mean class weight of its targets; 0 for an ignored row."""
        return mean_weight(target, self._valid(target), self.class_weight)

    @staticmethod
    def _seen(h: Tensor, features: Tensor | None) -> Tensor:
        """What the sampler looks at, [B, f]."""
        return (h if features is None else features.reshape(h.shape[0], features.shape[-1])).detach()

    def _prior(self, h: Tensor, features: Tensor | None) -> Prior | None:
        """log p_n of a block of rows, [n, C], where Eq. 5 asks for it; `h` is [B, d]."""
        if self.loss != "negative_sampling":
            return None
        seen = self._seen(h, features)
        sampler: Any = self.sampler
        return lambda rows: sampler.log_prob_all(seen[rows])

    def _check_features(self, method: str, features: Tensor | None, lead: torch.Size) -> None:
        if features is None or features.shape[:-1] == lead:
            return
        where = "SampledClassifier" if method == "forward" else f"SampledClassifier.{method}"
        want = ", ".join([*(str(n) for n in lead), "f"])
        raise ValueError(f"{where}: features must be [{want}] to fit h, got {_describe(features)}")

    def scores(
        self, h: Tensor, features: Tensor | None = None, corrected: bool = True, *, chunk_size: int | None = None
    ) -> Tensor:
        """Scores of all classes, `scale * (h @ w + b)`; with negative sampling plus log p_n(y|x), Eq. 5.

        Args:
            h: [*, d].
            features: [*, f], what the sampler looks at where that is not `h`.
            corrected: False leaves log p_n out. Without negative sampling there is nothing to correct.
            chunk_size: classes per chunk; chosen from the shapes when not given.

        Returns:
            [*, C] fp32 (fp64 with fp64 parameters), without gradient. `log_prob` is their log_softmax.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> sampler = sx.samplers.Unigram(torch.arange(1.0, 51.0))
            >>> head = sx.SampledClassifier(4, 50, sampler, num_samples=10, loss="negative_sampling")
            >>> h = torch.randn(3, 4)
            >>> added = head.scores(h) - head.scores(h, corrected=False)
            >>> torch.allclose(added, sampler.log_prob_all().expand(3, 50), atol=1e-5)
            True
        """
        lead = self._check_h("scores", h)
        self._check_features("scores", features, lead)
        rows = h.reshape(-1, self.in_features)
        out = exact_scores(
            rows,
            self.weight,
            self.bias,
            scale=self.scale,
            absolute=self.absolute,
            prior=self._prior(rows, features) if corrected else None,
            chunk_size=chunk_size,
        )
        return out.reshape(*lead, self.num_classes)

    def log_prob(self, h: Tensor, *, features: Tensor | None = None, chunk_size: int | None = None) -> Tensor:
        """Exact log-probabilities of all classes; [*, C] by definition, beyond it only a chunk is held.

        Args:
            h: [*, d].
            features: [*, f], what the sampler looks at where that is not `h`; used with negative sampling.
            chunk_size: classes per chunk; chosen from the shapes when not given.

        Returns:
            [*, C] fp32 (fp64 with fp64 parameters), without gradient.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> h = torch.randn(3, 4)
            >>> torch.allclose(head.log_prob(h), torch.log_softmax(head.linear()(h), -1), atol=1e-5)
            True
        """
        lead = self._check_h("log_prob", h)
        self._check_features("log_prob", features, lead)
        rows = h.reshape(-1, self.in_features)
        out = exact_log_prob(
            rows,
            self.weight,
            self.bias,
            scale=self.scale,
            absolute=self.absolute,
            prior=self._prior(rows, features),
            chunk_size=chunk_size,
        )
        return out.reshape(*lead, self.num_classes)

    def predict(self, h: Tensor, *, features: Tensor | None = None, chunk_size: int | None = None) -> Tensor:
        """The most probable class of each row; of equal ones the lowest id.

        Args:
            h: [*, d].
            features: [*, f], what the sampler looks at where that is not `h`; used with negative sampling.
            chunk_size: classes per chunk; chosen from the shapes when not given.

        Returns:
            int64 [*].

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> head.predict(torch.randn(3, 4)).shape
            torch.Size([3])
        """
        return self.topk(h, 1, features=features, chunk_size=chunk_size)[1].squeeze(-1)

    def topk(
        self,
        h: Tensor,
        k: int,
        *,
        features: Tensor | None = None,
        candidates: str | Tensor | None = None,
        beam: int | None = None,
        tree: nn.Module | None = None,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The k most probable classes of each row: exactly, without an [*, C], or among candidates.

        With `candidates="tree"` a beam search of a fitted tree names `beam` classes a row in O(beam log C), and their
        exact logits decide: the answer is exact wherever the search found the right classes. See docs/prediction.md.

        Args:
            h: [*, d].
            k: how many, 1 to C; with candidates, up to as many as there are.
            features: [*, f], what the sampler (or the tree) looks at where that is not `h`.
            candidates: None, all classes; "tree"; or int64 [*, n], classes of one's own choice for each row, no class
                twice, -1 for none.
            beam: nodes that the search keeps at each level, k to 512, and so candidates a row; 64 or 4 k by default.
            tree: the `Tree` that is searched; by default the head's sampler, if that is one.
            chunk_size: classes per chunk; chosen from the shapes when not given.

        Returns:
            (logits [*, k], ids int64 [*, k]), largest first, equal logits in ascending id order. The logits are those
            of `scores`. With candidates, -inf and -1 where a row has fewer than k.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> logits, ids = head.topk(torch.randn(3, 4), 5)
            >>> logits.shape, ids.shape
            (torch.Size([3, 5]), torch.Size([3, 5]))
        """
        lead = self._check_h("topk", h)
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.num_classes:
            raise ValueError(f"SampledClassifier.topk: k must be an int in [1, {self.num_classes}], got {k!r}")
        self._check_features("topk", features, lead)
        rows = h.reshape(-1, self.in_features)
        if candidates is not None:
            logits, ids = self._topk_among(rows, k, features, candidates, beam, tree)
            return logits.reshape(*lead, k), ids.reshape(*lead, k)
        if beam is not None or tree is not None:
            raise ValueError("SampledClassifier.topk: candidates must be 'tree' where beam or tree is given, got None")
        logits, ids = exact_topk(
            rows,
            self.weight,
            k,
            self.bias,
            scale=self.scale,
            absolute=self.absolute,
            prior=self._prior(rows, features),
            chunk_size=chunk_size,
        )
        return logits.reshape(*lead, k), ids.reshape(*lead, k)

    @torch.no_grad()
    def _topk_among(
        self, h: Tensor, k: int, features: Tensor | None, candidates: str | Tensor, beam: int | None, tree: Any
    ) -> tuple[Tensor, Tensor]:
        """`topk` among candidates, for h [B, d]."""
        where = "SampledClassifier.topk"
        seen = self._seen(h, features)
        sampler: Any = self.sampler
        added = None
        if isinstance(candidates, Tensor):
            ids = candidates.reshape(h.shape[0], candidates.shape[-1]) if candidates.dim() else candidates
            if ids.dim() != 2 or ids.dtype != torch.int64 or not k <= ids.shape[1]:
                raise ValueError(
                    f"{where}: candidates must be [*, n] int64 with n >= k = {k}, got {_describe(candidates)}"
                )
        elif candidates == "tree":
            tree = sampler if tree is None else tree
            if not isinstance(tree, Tree):
                raise TypeError(f"{where}: tree must be a samplers.Tree, as the sampler is none, got {tree!r}")
            if tree.num_classes != self.num_classes:
                raise ValueError(f"{where}: tree must have num_classes = {self.num_classes}, got {tree.num_classes}")
            most = min(512, self.num_classes)
            beam = min(most, max(64, 4 * k)) if beam is None else beam
            if isinstance(beam, bool) or not isinstance(beam, int) or not k <= beam <= 512:
                raise ValueError(f"{where}: beam must be an int in [k, 512] = [{k}, 512], got {beam!r}")
            log_p, ids = tree.topk(seen, min(beam, most), beam=beam)
            if tree is sampler:
                added = log_p
        else:
            raise ValueError(f"{where}: candidates must be None, 'tree' or int64 ids, got {candidates!r}")
        if self._prior(h, features) is None:
            added = None
        elif added is None:
            added = sampler.log_prob(seen, ids.clamp(min=0))
        return rerank(h, self.weight, ids, k, self.bias, scale=self.scale, absolute=self.absolute, added=added)

    def index(self, kind: str = "flat", **options: Any) -> ClassIndex:
        """An approximate nearest-neighbour index over the class rows (FAISS), for `index.topk(h, k)`.

        The index holds a copy of the rows as they are now. Needs the extra `faiss`.

        Args:
            kind: "flat" (exhaustive), "ivf" or "hnsw"; or any string that `faiss.index_factory` takes.
            options: passed on to `samplex_cuda.index.ClassIndex`.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
            >>> index = head.index()  # doctest: +SKIP
            >>> logits, ids = index.topk(torch.randn(3, 4), 5)  # doctest: +SKIP
        """
        from samplex_cuda.index import ClassIndex

        return ClassIndex(self, kind, **options)

    def linear(self) -> nn.Linear:
        """An `nn.Linear` that shares `weight` and `bias`, for export; it knows no `scale` and no `absolute`.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Unigram(torch.ones(50)), num_samples=10)
            >>> sorted(head.linear().state_dict())
            ['bias', 'weight']
        """
        # On meta nothing is allocated before the parameters are put in.
        linear = nn.Linear(self.in_features, self.num_classes, bias=self.bias is not None, device="meta")
        linear.weight = self.weight
        if self.bias is not None:
            linear.bias = self.bias
        return linear

    def _check_h(self, method: str, h: Tensor) -> torch.Size:
        where = "SampledClassifier" if method == "forward" else f"SampledClassifier.{method}"
        if not isinstance(h, Tensor) or h.dim() == 0 or h.shape[-1] != self.in_features or not h.is_floating_point():
            raise ValueError(f"{where}: h must be [*, {self.in_features}] floating point, got {_describe(h)}")
        return h.shape[:-1]

    def _apply(self, fn: Any, recurse: bool = True) -> SampledClassifier:
        exact = {"class_weight": self.class_weight, "log_eta": self.log_eta}
        super()._apply(fn, recurse)
        # `.to(bfloat16)` is about the parameters; rounded class weights would shift the loss.
        for name, value in exact.items():
            now = getattr(self, name)
            if value is not None and now.dtype != self._wide():
                setattr(self, name, value.to(device=now.device, dtype=self._wide()))
        return self

    def _wide(self) -> torch.dtype:
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint of nn.Linear has no `sampler.` entry at all: load it strictly all the same, and keep the sampler.
        without = not any(name.startswith(f"{prefix}sampler.") for name in state_dict)
        if without and self.sampler is not None:
            state_dict.update(self.sampler.state_dict(prefix=f"{prefix}sampler."))
            if self.log_eta is not None:
                state_dict.setdefault(f"{prefix}log_eta", self.log_eta)
        # A checkpoint of this head holds the sampler as it was; one without a sampler brings rows it has not seen.
        self._touched, self._steps, self._stale = [], 0, without
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """What `print(head)` shows; options at their defaults are left out."""
        parts = [
            f"in_features={self.in_features}, num_classes={self.num_classes}, num_samples={self.num_samples}",
            f"loss={self.loss}, bias={self.bias is not None}",
        ]
        defaults = {
            "shared": False,
            "stratified": False,
            "scale": 1.0,
            "absolute": False,
            "label_smoothing": 0.0,
            "reg": 0.0,
            "eta_rate": 0.5,
            "ignore_index": -100,
            "sparse": True,
            "reduction": "mean",
            "sampler_update": None,
        }
        parts += [f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value]
        if self.log_eta is not None:
            parts.append(f"num_examples={self.log_eta.shape[0]}")
        if self.class_weight is not None:
            parts.append("class_weight=True")
        return ", ".join(parts)


def _flush_sampler(head: SampledClassifier, prefix: str, keep_vars: bool) -> None:
    # A checkpoint holds the sampler of its own weights, so that a resumed run draws what the run itself would have.
    if head.sampler_update is not None and head.sampler_update != "epoch" and head._steps:
        head.update_sampler()
