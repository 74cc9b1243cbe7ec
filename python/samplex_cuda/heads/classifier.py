"""`SampledClassifier`: the module that takes the place of `nn.Linear(d, C)` + `nn.CrossEntropyLoss`.

In training a step costs O(num_samples) per row, whatever C is; in evaluation the answers are exact and cost O(C).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samplex_cuda import losses
from samplex_cuda._checks import check_int, describe
from samplex_cuda.draw import COPIES, Draw, Negatives
from samplex_cuda.functional._inputs import target_weights
from samplex_cuda.heads.checks import (
    check_options,
    check_sampler,
    check_settings,
    check_sphere,
    check_unique,
    refuse_moved,
)
from samplex_cuda.heads.follow import TableFollower
from samplex_cuda.heads.hard import join_losses
from samplex_cuda.heads.host import crosses, host_loss
from samplex_cuda.heads.step import LossSpec, StepOfHead
from samplex_cuda.losses import Loss
from samplex_cuda.ops.loss_types import REDUCTIONS, Form
from samplex_cuda.optim.fusion import Fusion
from samplex_cuda.optim.torch_clip import watch_sparse_norm
from samplex_cuda.rng import Key
from samplex_cuda.samplers.static import StaticSampler
from samplex_cuda.tables import empty_table

if TYPE_CHECKING:
    from samplex_cuda.distributed import ShardedClassifier
    from samplex_cuda.optim import Combined, RowOptimizer

__all__ = ["LossSpec", "SampledClassifier"]

_NAME = "SampledClassifier"
_is_compiling = torch.compiler.is_compiling
# Attributes whose change makes the head resolve its step again.
_SETTINGS = frozenset(
    {"loss", "num_samples", "shared", "stratified", "unique", "scale", "ignore_index", "sparse", "reduction", "sampler"}
    | {"normalize", "live", "_replica"}
)


class SampledClassifier(StepOfHead):
    """A linear classifier over C classes that trains on sampled classes and evaluates exactly.

    In training mode `head(h, y)` draws `num_samples` classes per row (or once for the batch, with `shared=True`) and
    returns the sampled loss; gradients reach only the rows that were touched. In eval mode `head(h, y)` is the exact
    negative log-likelihood over all classes, computed in chunks, without gradient.

    With `loss="negative_sampling"` (Bamler & Mandt 2020) the scores are learned relative to the sampler's distribution
    p_n, so evaluation and prediction add log p_n(y|x) back (Eq. 5): the NLL, `log_prob`, `predict`, `topk` and
    `scores`. The sampler is then part of the model: keep it with the weights, and keep it fixed, or later predictions
    are corrected by another distribution than the one the scores were learned against.

    `weight` [C, d] and `bias` [C] have the names, shapes and initial values of `nn.Linear(d, C)`:

    - `head.load_state_dict(linear.state_dict())` works as it is: a checkpoint without a sampler leaves
      the sampler as it is;
    - `head.linear()` is an `nn.Linear` that shares the parameters; its `state_dict()` holds nothing else.

    The sampler is a submodule: `state_dict()` keeps its state under `sampler.`, and `.to(device)` moves it.

    Args:
        in_features: d, the width of `h`.
        num_classes: C.
        sampler: where negatives come from, for the same C. May be left out with "full_softmax".
        num_samples: draws per row, or per batch with `shared=True`. Not used by "full_softmax".
        loss: an object of `sx.losses`, which carries the options of the loss, or its short name: "sampled_softmax",
            "negative_sampling", "nce", "one_vs_each", "full_softmax" (exact, O(C) per row, dense gradients).
            docs/losses.md compares them.
        bias: whether there is a bias per class; by default, unless `normalize=True`, which takes none.
        shared: draw once for the whole batch. Targets among the draws are then masked, whereas per-row draws exclude
            them beforehand; both leave the expected normalizer right. (Negative sampling and NCE do neither.) A sampler
            whose distribution differs per row draws from the mean of these distributions. On the CPU, classes that were
            drawn more than once are computed once (`Draw.merged`): many draws from a skewed distribution are cheap.
        stratified: stratified shared draws instead of independent ones (`Tree.sample`): the same expectation with less
            variance, so that fewer draws are enough. Requires a `Tree` or a `MIDX`, and a loss that is a sum
            over weighted draws.
        unique: distinct classes, weighted by their inclusion probability (True), or as TensorFlow's candidate samplers
            draw them by default ("tf", biased): `StaticSampler.unique`. Requires `Uniform`, `LogUniform`, `Unigram` or
            `Bigram` and a loss over weighted draws. On a GPU each draw waits for the device.
        scale: inverse temperature; the logit is `scale * (h @ w + b)`.
        normalize: take `h` and the class rows on the unit sphere, so that the logit is `scale * cos(h, w)`; gradients
            go through the norms. A row of zeros has cosine 0 and no gradient. For `SampledSoftmax`, which then takes
            margins, and `FullSoftmax`. See docs/faces.md.
        learn_scale: learn the scale, from `scale` on: the parameter `log_scale` is its logarithm, and `head.scale` is
            1. It takes no bias either. A row optimizer takes `[head.weight]` and not this.
        class_weight: [C], as `weight` of `F.cross_entropy`. It moves with the module, keeps at least fp32 and is not
            part of `state_dict()`.
        ignore_index: rows of this target have no loss and no gradient.
        sparse: give `weight` and `bias` sparse COO gradients (`torch.optim.SGD`, `Adagrad` and `SparseAdam` take
            them); otherwise dense ones, which cost O(C) per step.
        reduction: "mean", "sum" or "none".
        sampler_update: how a sampler that depends on the class table (`Quadratic`, `RandomFourier`, `MIDX`) follows it.
            "step": before each training forward it receives the rows that the last one touched; an int k: every k
            forwards; "epoch": it is rebuilt whenever the head goes from eval to training mode; None: never, the caller
            does it; "auto": "step" if the sampler depends on the table, else None. On a GPU, and with `MIDX`, "auto"
            becomes an int k at the first batch if following every step would cost more than the draws. With a
            policy, the first forward rebuilds. Only rows that a forward touched count as changed, so dense weight decay
            or momentum needs "epoch", or `mark_changed()` now and then. See `staleness` and `update_sampler`.
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

    log_eta: Tensor | None
    log_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        sampler: nn.Module | None = None,
        num_samples: int | None = None,
        loss: str | Loss = "sampled_softmax",
        bias: bool | None = None,
        *,
        shared: bool = False,
        stratified: bool = False,
        unique: bool | str = False,
        scale: float = 1.0,
        normalize: bool = False,
        learn_scale: bool = False,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        sparse: bool = True,
        reduction: str = "mean",
        sampler_update: str | int | None = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **moved: Any,
    ) -> None:
        super().__init__()
        refuse_moved(moved)
        check_int(_NAME, "in_features", in_features, 1, 1 << 32)
        check_int(_NAME, "num_classes", num_classes, 1, 1 << 52)
        loss = losses.resolve(loss, _NAME)
        if loss.needs.draws:
            if sampler is None:
                raise TypeError(
                    f"{_NAME}: sampler must be a sampler of samplex_cuda.samplers with {loss!r}, got None; "
                    f"take sx.samplers.LogUniform({num_classes}) if classes are sorted by frequency, Unigram(counts) "
                    'if counts are known, Uniform otherwise; loss="full_softmax" needs no sampler'
                )
            if num_samples is not None or not getattr(sampler, "takes_targets", False):
                check_int(_NAME, "num_samples", num_samples)
        check_options(ignore_index, reduction, scale)
        if class_weight is not None and (
            not isinstance(class_weight, Tensor)
            or class_weight.shape != (num_classes,)
            or not class_weight.dtype.is_floating_point
        ):
            raise ValueError(f"{_NAME}: class_weight must be [{num_classes}] float32, got {describe(class_weight)}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"{_NAME}: dtype must be floating point, got {dtype!r}")
        bias = not (normalize or learn_scale) if bias is None else bool(bias)
        check_sphere(loss, normalize, learn_scale, scale, bias)
        policy = check_sampler(sampler, loss, num_classes, bias, shared, stratified, sampler_update)
        check_unique(sampler, loss, unique)

        self.in_features = in_features
        self.num_classes = num_classes
        self.num_samples = (num_samples or 0) if loss.needs.draws else 0
        self.loss = loss
        self.shared = shared
        self.stratified = stratified
        self.unique = unique
        self.scale = 1.0 if learn_scale else float(scale)
        self.first_scale = float(scale)  # where a learned scale starts
        self.normalize = bool(normalize)
        self.ignore_index = ignore_index
        self.sparse = sparse
        self.reduction = reduction
        self.weight = nn.Parameter(empty_table(num_classes, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.register_parameter("log_scale", None)
        if learn_scale:
            start = torch.tensor(math.log(scale), device=device, dtype=self._wide())
            self.log_scale = nn.Parameter(start)
        self.sampler = sampler
        self.follower = TableFollower(policy, self.num_classes, sampler_update == "auto")
        self._fusion: Fusion | None = None
        self._sink = None
        self._made_step = None
        self.host = None
        self._replica: Any = None  # what sx.distributed.replicate made
        if class_weight is not None:
            place = class_weight.device if self.weight.is_meta else self.weight.device  # numbers are not lost on meta
            class_weight = class_weight.detach().to(device=place, dtype=self._wide())
        # Not persistent: a checkpoint holds what nn.Linear's does.
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.register_buffer("live", None)  # bool [C] if classes are retired
        state = loss.example_state(num_classes)
        self._state_name = None if state is None else state.name
        self.register_buffer("log_eta", None)
        if state is not None:
            start = torch.full((state.size,), state.value, device=self.weight.device, dtype=self._wide())
            self.register_buffer(state.name, start)
        self._spec: LossSpec | None = self._resolve()
        self.reset_parameters()
        watch_sparse_norm()

    def reset_parameters(self) -> None:
        """Initial values of `nn.Linear`: the same bits after the same `torch.manual_seed`."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1.0 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, math.log(self.first_scale))

    def __setattr__(self, name: str, value: Any) -> None:
        """As in `nn.Module`; a changed setting makes the head resolve its step again."""
        if name == "loss":
            value = losses.resolve(value, _NAME)
        super().__setattr__(name, value)
        if name in _SETTINGS:
            self.__dict__["_spec"] = None

    def spec(self) -> LossSpec:
        """How the training step of this configuration draws and what its loss needs.

        Example:
            >>> import samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10, loss="nce")
            >>> head.spec().needs.target_log_q
            True
        """
        return self._spec or self._resolve()

    def _resolve(self) -> LossSpec:
        """The step of this configuration: the one place where it is decided."""
        loss, needs = self.loss, self.loss.needs
        check_settings(self)
        form = Form(
            float(self.scale),
            int(self.ignore_index),
            REDUCTIONS[self.reduction],
            bool(self.sparse),
            normalize=self.normalize,
        )
        sampling: dict[str, Any] = {"shared": True} if self.shared else {}
        if self.stratified:
            sampling["stratified"] = True
        if self.unique:
            sampling["unique"] = self.unique
        draws_static = self._draws_static()
        as_they_are = self.live is None and self.log_scale is None and self._replica is None and not self.normalize
        self._spec = LossSpec(
            loss,
            needs,
            form,
            form._replace(reduction=REDUCTIONS["none"]),
            excludes=needs.excludes_target and not self.shared,
            merges=needs.mergeable and self.shared and not self.unique,
            sampling=sampling,
            draws_static=draws_static,
            plain=draws_static and as_they_are and not needs.example_index,
        )
        return self._spec

    def _draws_static(self) -> bool:
        """Whether draw and loss can be one op: a static sampler as it is, and no copies of shared draws to merge."""
        loss, sampler = self.loss, self.sampler
        if not (loss.draws_static(self.shared) and isinstance(sampler, StaticSampler)):
            return False
        if self.ignore_index >= 0 or self.unique:
            return False
        if type(sampler).sample is not StaticSampler.sample or "sample" in sampler.__dict__:
            return False
        return not (self.shared and loss.needs.mergeable and sampler.collision() * self.num_samples > COPIES)

    # -------------------------------------------------------------------------------------------- a step
    def forward(
        self,
        h: Tensor,
        y: Tensor,
        *,
        negatives: Draw | Negatives | None = None,
        hard: Tensor | None = None,
        features: Tensor | None = None,
        index: Tensor | None = None,
        context: Any = None,
        sample_weight: Tensor | None = None,
        target_weight: Tensor | None = None,
        positives: tuple[Tensor, Tensor] | None = None,
        key: Key | Tensor | None = None,
    ) -> Tensor:
        """Sampled loss in training mode, exact NLL in eval mode.

        Args:
            h: [*, d].
            y: int64 [*], or [*, P] for several targets per row, padded with -100.
            negatives: the caller's own instead of the sampler's draws: a `Draw`, or `Negatives`, which may be ragged
                and without log_q. One that is a target of its row takes no part. Losses that read log q of the targets
                (negative_sampling, nce) refuse them; eval mode ignores them. See docs/negatives.md.
            hard: int64 [*, k], further negatives of each row with their plain scores, in one normalizer with the
                others; see `HardNegatives`. Requires "sampled_softmax" without smoothing, one target per row and no
                class weights.
            features: [*, f], what the sampler looks at where that is not `h`.
            index: int64 [*], example numbers in [0, num_examples), for losses that keep a number per example.
            context: what context-dependent samplers need; others ignore it.
            sample_weight: [*], multiplies the loss of each row; "mean" divides by the sum of the weights.
            target_weight: floating point, the shape of `y`: what each target weighs, as class probabilities in
                `F.cross_entropy`; "mean" then divides by the number of rows. By default 1 / P each. For
                `SampledSoftmax` and `FullSoftmax`.
            positives: CSR pair (offsets int64 [B + 1], ids int64): further known positives of each row, never counted
                as negatives in training. Ignored by the exact NLL of eval mode.
            key: where the draw comes from, a `Key` or its reserved tensor; by default torch's generator.

        Returns:
            fp32 scalar, or [*] with `reduction="none"` (fp64 with fp64 parameters).

        Example:
            >>> import torch, samplex_cuda as sx
            >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10, reduction="none")
            >>> head(torch.randn(2, 3, 4), torch.randint(50, (2, 3))).shape
            torch.Size([2, 3])
        """
        spec = self._spec or self._resolve()
        # One check instead of one per argument: in a small step these take longer than the kernels.
        if (
            spec.plain
            and negatives is hard is features is index is sample_weight is target_weight is positives is None
            and self.training
            and not _is_compiling()
        ):
            loss = self._plain_loss(spec, h, y, key)
            if loss is not None:
                return loss
        if self.host is not None and isinstance(h, Tensor) and crosses(h, self.weight):
            given = {
                "negatives": negatives, "hard": hard, "features": features, "index": index, "context": context,
                "sample_weight": sample_weight, "target_weight": target_weight, "positives": positives, "key": key,
            }  # fmt: skip
            return host_loss(self, h, y, given)
        if self._replica is not None and self.training:
            exchange: Any = self._replica.loss
            if _is_compiling():
                from samplex_cuda._eager import eager_replica_loss as exchange
            return exchange(
                self, h, y, features, index, context, sample_weight, positives, key, negatives, target_weight, hard
            )
        rows, target, lead = self._check_batch(h, y, features, sample_weight, positives)
        if self.live is not None:
            target = self._refuse_retired(target)
        shares = None
        if target_weight is not None:
            if not spec.loss.takes_target_weight:
                raise ValueError(f"{_NAME}: target_weight must be None with {spec.loss!r}, got a tensor")
            shares = target_weights(_NAME, target_weight, y, target, self.weight)
        if not self.training:
            loss = self.exact_loss(rows, target, features, shares)
            return self._reduced(loss, target, sample_weight, lead, shares is not None)
        own = None if negatives is None else self._own_negatives(spec, negatives, target, lead)
        index = self._check_index(index, lead) if spec.needs.example_index else None
        mined = None if hard is None else self._hard_negatives(spec, hard, target, lead)
        form = spec.form if sample_weight is None and mined is None else spec.rows
        if not spec.needs.draws:
            loss = self._full_loss(rows, target, sample_weight is not None, shares)
        else:
            run: Any = type(self)._sampled_loss
            if (self._fusion is not None or self.follower.active) and _is_compiling():
                # An update inside backward, or of a sampler that follows the table, is not a function of its inputs: a
                # compiled caller leaves its graph here.
                from samplex_cuda._eager import eager_loss as run
            loss = run(self, spec, form, rows, target, features, index, context, positives, key, own, shares)
            if mined is not None:
                more = run(self, spec, form, rows, target, features, index, context, positives, key, mined, shares)
                return self._reduced(join_losses(loss, more), target, sample_weight, lead, shares is not None)
        if sample_weight is not None:
            return self._reduced(loss, target, sample_weight, lead, shares is not None)
        return loss if form.reduction or len(lead) == 1 else loss.reshape(lead)

    # -------------------------------------------------------------------------------------------- the optimizer
    def fuse_optimizer(
        self, optimizer: RowOptimizer | Combined | None, accumulate: int = 1, *, grad_scaler: Any = None
    ) -> None:
        """Let `optimizer` update this head inside backward: no gradient of the class table is ever stored.

        From then on `weight.grad` and `bias.grad` stay None, and `optimizer.step()` has nothing to do. The rate is read
        at each update, so schedulers work; the optimizer of the encoder is untouched. Several losses of this head in
        one backward make one update of their sum. Where the weight gets a gradient from elsewhere too (a tied weight),
        or has changed between a forward and its backward, backward raises. See docs/optim.md.

        Args:
            optimizer: `sx.optim.RowSGD`, `RowAdagrad` or `RowAdam` of this head's parameters and no others; or a
                `Combined` with one of them, whose `step()` updates all that is not this head's. None undoes the fusion.
            accumulate: every k-th backward updates, with the gradients of all k summed. Until then ids, coefficients
                and `h` are kept, never [C, d]. `fused.flush()` updates earlier.
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
        fusion = None
        if optimizer is not None:
            fusion = Fusion(self.weight, self.bias, optimizer, accumulate, grad_scaler, self.mark_rows)
        if self._fusion is not None:
            self._fusion.remove()
        self._fusion = fusion

    def shard(
        self,
        mesh_or_group: Any = None,
        *,
        encoder: str,
        batch_capacity: int | None = None,
        order: str = "class",
        route: str = "summed_logits",
        key: Key | Tensor | None = None,
        device: torch.device | str | None = None,
        sampler: str = "auto",
    ) -> ShardedClassifier:
        """This head with its class rows spread over the ranks of a process group; every rank must call it.

        A head on the meta device works too: then no rank ever holds [C, d], and the rows are made from the key and
        their class, whatever the number of ranks. See docs/scale.md.

        Args:
            mesh_or_group: a `DeviceMesh` of one dimension or a process group; None: all ranks.
            encoder: what happens to the gradients of the model before the head: "average" over the ranks, as
                DistributedDataParallel and FSDP2 do, or "sum".
            batch_capacity: the most rows of a rank in a step; None: the most in the first step.
            order: "class": a rank holds a range of classes; "spread": neighboring classes lie far apart, so that
                frequent ones do not meet on one rank.
            route: how queries and class rows meet, decided here once: "summed_logits", which takes every loss and has
                the same bits on any number of ranks; "online_softmax", "rows_to_queries", "shared_rows"; "auto": what
                sends the fewest bytes. docs/scale.md compares them.
            key: what the rows of a head on the meta device are made from; by default torch's generator on rank 0.
            device: of the rows of a head on the meta device; the CPU by default.
            sampler: "replicate" a `Unigram` or `Tree` on every rank, or "shard" it; "auto": shard it above 10^7
                classes. Samplers that depend on the class table are always sharded, others replicated.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> with torch.device("meta"):
            ...     head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
            >>> head = head.shard(encoder="average")  # doctest: +SKIP
        """
        from samplex_cuda.distributed import ShardedClassifier

        return ShardedClassifier(
            self,
            mesh_or_group,
            encoder=encoder,
            batch_capacity=batch_capacity,
            order=order,
            route=route,
            key=key,
            device=device,
            sampler=sampler,
        )

    @property
    def fused(self) -> Fusion | None:
        """What `fuse_optimizer` made: `fused.optimizer`, `fused.accumulate`, `fused.pending`; None if not fused."""
        return self._fusion
