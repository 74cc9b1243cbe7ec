"""Whether sampler, loss, optimizer and surroundings of a head fit each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samplex_cuda import losses
from samplex_cuda._checks import FLOATS, check_choice, check_int, check_number, describe
from samplex_cuda.losses import Loss
from samplex_cuda.ops.loss_types import REDUCTIONS
from samplex_cuda.samplers.static import StaticSampler

if TYPE_CHECKING:
    from samplex_cuda.heads.classifier import SampledClassifier
    from samplex_cuda.heads.exact import ExactAnswers
    from samplex_cuda.heads.module import HeadModule
    from samplex_cuda.heads.step import StepOfHead

__all__ = [
    "check_options",
    "check_retired",
    "check_sampler",
    "check_settings",
    "check_signed",
    "check_sphere",
    "check_unique",
    "explain_mismatch",
    "inside_ddp",
    "like_weight",
    "refuse_moved",
    "refuse_parametrized",
    "refuse_replicas",
    "refuse_sphere",
]

_NAME = "SampledClassifier"
_ddp = nn.parallel.DistributedDataParallel
_MOVED = ("label_smoothing", "absolute", "reg", "num_examples", "eta_rate")  # to the objects of sx.losses
_RENAMED = {"eta_rate": "rate"}
_LATER = ("fit_options", "base_units", "base_share")  # of a tree: older checkpoints have none


def refuse_moved(options: dict[str, Any]) -> None:
    """TypeError for options that belong to the loss, with the object that has them."""
    for name, value in options.items():
        if name not in _MOVED:
            raise TypeError(f"{_NAME}.__init__() got an unexpected keyword argument {name!r}")
        own = _RENAMED.get(name, name)
        objects = " or ".join(f"sx.losses.{kind}({own}=...)" for kind in losses.taking(own))
        raise TypeError(f"{_NAME}: {name} is an option of the loss: pass loss={objects}, got {name}={value!r}")


def check_sampler(
    sampler: Any, loss: Loss, num_classes: int, bias: bool, shared: bool, stratified: bool, update: Any
) -> str | int | None:
    """Whether sampler, loss and head fit each other; returns the policy by which the sampler follows the table."""
    needs = loss.needs
    without = sampler is None and not needs.draws
    if isinstance(sampler, str) and sampler == "auto":
        raise TypeError(
            f'{_NAME}: sampler must be a sampler of samplex_cuda.samplers, got "auto"; make the head with a static '
            "one, such as Unigram(counts), and let sx.training.HeadChooser choose how it draws"
        )
    if not without and (not isinstance(sampler, nn.Module) or not hasattr(sampler, "sample")):
        raise TypeError(f"{_NAME}: sampler must be a sampler of samplex_cuda.samplers, got {sampler!r}")
    of_sampler: Any = getattr(sampler, "num_classes", num_classes)
    if of_sampler != num_classes:
        raise ValueError(f"{_NAME}: sampler must have num_classes = {num_classes}, got {of_sampler}")
    follows = getattr(sampler, "follows_rows", False)
    if update == "auto":
        # Scores with a prior are relative to the distribution they were learned against: that sampler must stay fixed.
        update = "step" if follows and needs.draws and not needs.prior else None
    counts = isinstance(update, int) and not isinstance(update, bool) and update >= 1
    if not (counts or update in ("step", "epoch", None)):
        raise ValueError(
            f"{_NAME}: sampler_update must be 'auto', 'step', an int of at least 1, 'epoch' or None, got {update!r}"
        )
    if update is not None and needs.prior:
        raise ValueError(
            f"{_NAME}: sampler_update must be None with {loss!r}, whose sampler must stay fixed, got {update!r}"
        )
    if getattr(sampler, "takes_targets", False) and (not shared or needs.target_log_q or needs.prior):
        raise ValueError(
            f"{_NAME}: an InBatch sampler must have shared=True and a loss that masks targets among the draws, such as "
            f"sampled_softmax, got shared={shared!r} and {loss!r}"
        )
    if shared and needs.prior and getattr(sampler, "conditional", False):
        raise ValueError(
            f"{_NAME}: shared must be False with {loss!r} and a sampler whose distribution differs per row, because "
            "prediction cannot correct for the distribution of a training batch, got True"
        )
    if stratified and not (shared and getattr(sampler, "stratifies", False) and needs.weighted_draws):
        raise ValueError(
            f"{_NAME}: stratified requires shared=True, a Tree or a MIDX and a loss that weights its draws, got "
            f"shared={shared!r}, {type(sampler).__name__} and {loss!r}"
        )
    if follows and getattr(sampler, "has_bias", False) and not bias:
        raise ValueError(f"{_NAME}: bias must be True with a sampler that has a bias, got False")
    return update


def check_unique(sampler: Any, loss: Loss, unique: Any) -> None:
    """Whether a head can draw distinct classes."""
    if unique not in (False, True, "tf"):
        raise ValueError(f"{_NAME}: unique must be False, True or 'tf', got {unique!r}")
    if unique and not (hasattr(sampler, "log_inclusion") and loss.needs.weighted_draws and not loss.needs.target_log_q):
        raise ValueError(
            f"{_NAME}: unique must be False unless the sampler is Uniform, LogUniform, Unigram or Bigram and the loss "
            f"weights its draws, got {type(sampler).__name__} and {loss!r}"
        )


def check_settings(head: SampledClassifier) -> None:
    """Whether the attributes of a head, each of which can be set at any time, still fit each other."""
    loss, sampler = head.loss, head.sampler
    if loss.needs.draws and (head.num_samples != 0 or not getattr(sampler, "takes_targets", False)):
        check_int(_NAME, "num_samples", head.num_samples)
    check_options(head.ignore_index, head.reduction, head.scale)
    bias = head.bias is not None
    check_sphere(loss, head.normalize, head.log_scale is not None, head.scale, bias)
    check_sampler(sampler, loss, head.num_classes, bias, head.shared, head.stratified, head.follower.policy)
    check_unique(sampler, loss, head.unique)
    if loss.needs.example_index and head._state_name is None:
        raise ValueError(
            f"{_NAME}: loss must be given to the constructor if it keeps a value per example, got {loss!r}"
        )
    if head.live is not None:
        check_signed(_NAME, loss, head.scale)
        if not torch.compiler.is_compiling():
            check_retired(_NAME, sampler, head.live)


def check_options(ignore_index: Any, reduction: Any, scale: Any) -> None:
    """Whether these options of a head have values that there are."""
    check_int(_NAME, "ignore_index", ignore_index, -(1 << 63), (1 << 63) - 1)
    check_choice(_NAME, "reduction", reduction, REDUCTIONS)
    check_number(_NAME, "scale", scale, -math.inf)


def check_retired(where: str, sampler: Any, live: Tensor) -> None:
    """ValueError for a sampler that draws retired classes; only a static one can be asked."""
    if isinstance(sampler, StaticSampler):
        drawn = sampler.log_prob_all().reshape(-1)[~live.to(sampler._device())] > -torch.inf
        if bool(drawn.any()):
            raise ValueError(f"{where}: sampler must not draw retired classes, got {sampler!r}, which does")


def check_signed(where: str, loss: Any, scale: float) -> None:
    """ValueError for a head whose retired classes, at a score of -inf, would not have probability 0."""
    if loss.absolute or not scale > 0 or (not loss.needs.draws and loss.label_smoothing):
        raise ValueError(
            f"{where}: head must have signed logits, a scale above 0 and no label smoothing over all classes if it has "
            f"retired classes, got {loss!r}, scale={scale}"
        )


def check_sphere(
    loss: Loss, normalize: bool, learn_scale: bool = False, scale: float = 1.0, bias: bool = False
) -> None:
    """Whether the loss can take rows on the sphere, has them if it has a margin, and a learned scale has no bias."""
    if normalize and not loss.normalizes:
        raise ValueError(f"{_NAME}: normalize must be False with {loss!r}; SampledSoftmax and FullSoftmax take it")
    if loss.compares_angles and not normalize:
        raise ValueError(f"{_NAME}: normalize must be True with a margin, got False: margins are defined on angles")
    if bias and (normalize or learn_scale):
        what = "normalize" if normalize else "learn_scale"
        raise ValueError(f"{_NAME}: bias must be False with {what}=True, got True")
    if learn_scale and not scale > 0:
        raise ValueError(f"{_NAME}: scale must be above 0 with learn_scale=True, got {scale!r}")


def refuse_sphere(head: ExactAnswers, op: str) -> None:
    """ValueError for a head with rows on the sphere and what else few places take."""
    corrected = getattr(head.loss, "corrected", True)
    if head.normalize or head.log_scale is not None or not corrected or head.live is not None:
        got = f"normalize={head.normalize}, learn_scale={head.log_scale is not None}, corrected={corrected}"
        raise ValueError(
            f"{op}: head must have normalize=False, learn_scale=False, a corrected loss and no retired classes, got "
            f"{got}, {head.num_classes} classes"
        )


def explain_mismatch(
    head: HeadModule,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: Any,
    unexpected: Any,
    errors: list[str],
) -> None:
    """Adds to the errors of `load_state_dict` what to do about another size or another sampler."""
    weight = state_dict.get(f"{prefix}weight")
    if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape != head.weight.shape:
        classes, width = weight.shape
        errors.append(
            f"{_NAME}: the state dict has {classes} classes of width {width}, this head has {head.num_classes} of "
            f"width {head.in_features}: make it with {_NAME}({width}, {classes}, ...) and such a sampler"
        )
    start = f"{prefix}sampler."
    stored = {name.removeprefix(start) for name in state_dict if name.startswith(start)}
    own = set() if head.sampler is None else set(head.sampler.state_dict()) | {"fit_options"}
    needed = {name for name in own if name.rpartition(".")[2] not in _LATER}
    reads = getattr(head.sampler, "reads", None)  # what else a sampler takes for its state
    if strict and stored and not (needed <= stored <= own or (reads is not None and reads(stored))):
        kind = "no sampler" if head.sampler is None else f"a {type(head.sampler).__name__}"
        errors.append(
            f"{_NAME}: the state dict holds another sampler, with {', '.join(sorted(stored))}; this head has {kind}: "
            "make it with the saved sampler, or load the weights alone, "
            "head.load_state_dict(other.linear().state_dict()) or the entries weight and bias"
        )


def like_weight(h: Tensor, weight: Tensor) -> Tensor:
    """h in the dtype of the weight, under autocast; an error otherwise."""
    if h.device != weight.device:
        raise ValueError(f"{_NAME}: h must be on {weight.device} like weight, got {describe(h)}")
    if not (h.dtype in FLOATS and torch.is_autocast_enabled(h.device.type)):
        raise TypeError(f"{_NAME}: h must be {weight.dtype} like weight (or run under autocast), got {describe(h)}")
    return h.to(weight.dtype)


def refuse_parametrized(head: StepOfHead) -> None:
    """Raises for sparse gradients of a weight that is computed, which torch cannot pass on."""
    computed = [name for name in ("weight", "bias") if torch.nn.utils.parametrize.is_parametrized(head, name)]
    if computed:
        raise ValueError(
            f"{_NAME}: sparse must be False where {computed[0]} is parametrized, because torch cannot pass row "
            "gradients through a parametrization, got True"
        )


def refuse_replicas(head: StepOfHead) -> None:
    """Raises inside DistributedDataParallel, which does not synchronize sparse gradients and fused updates."""
    if _ddp._active_ddp_module is None or not inside_ddp(head):
        return
    how = "a fused optimizer" if head.fused is not None else "sparse gradients"
    raise RuntimeError(
        f"{_NAME}: a head with {how} must not be inside DistributedDataParallel, which would not synchronize its class "
        'table across ranks. Call sx.distributed.replicate(model, encoder="average") on the model before it is '
        "wrapped, and every rank keeps the whole table; or wrap only the encoder and spread the table over the ranks, "
        'head.shard(encoder="average"); or use sparse=False without a fused optimizer (dense gradients, O(C) per step)'
    )


def inside_ddp(head: nn.Module) -> bool:
    """Whether a DistributedDataParallel that holds this module runs its forward now."""
    active = _ddp._active_ddp_module
    return active is not None and any(module is head for module in active.module.modules())
