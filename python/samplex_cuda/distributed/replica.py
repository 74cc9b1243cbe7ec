"""`replicate(model, encoder=...)`: plain heads on several ranks, each with the whole class table.

For tables that fit everywhere. Each rank computes the loss of its own rows; what travels is what the update of the
table is made from, the rows h, the ids and a coefficient of each, never a gradient of [C, d].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samplex_cuda import _device
from samplex_cuda._checks import check_choice, check_int, op_error
from samplex_cuda.distributed.collectives import ENCODERS, Everyone, Exchange, check_backend, group_of
from samplex_cuda.distributed.embeddings import share_embeddings, sparse_embeddings
from samplex_cuda.distributed.health import agree
from samplex_cuda.distributed.rows import (
    fixed_query,
    joined,
    key_of_rows,
    own_draw,
    refuse_head,
    target_shares,
    widened,
    without_rows,
)
from samplex_cuda.distributed.settings import agreed, digest, settings_of, whole_settings
from samplex_cuda.distributed.step import StepResult, run_step, times
from samplex_cuda.draw import Draw
from samplex_cuda.functional._inputs import known_positives
from samplex_cuda.heads.checks import inside_ddp, like_weight
from samplex_cuda.heads.classifier import LossSpec, SampledClassifier
from samplex_cuda.ops.loss_types import REDUCTIONS, Entries, Inputs, LossGrad, Plan
from samplex_cuda.ops.row_gradients import entries
from samplex_cuda.prediction import mean_weight
from samplex_cuda.rng import Key

__all__ = ["Replica", "replicate"]

_NAME = "sx.distributed.replicate"


def replicate(
    module: nn.Module,
    mesh_or_group: Any = None,
    *,
    encoder: str,
    batch_capacity: int | str | None = None,
) -> nn.Module:
    """Keeps the class tables of plain heads equal on all ranks; call it before DistributedDataParallel wraps `module`.

    In training mode the loss is then the mean over the rows of all ranks, however many each has, and every rank must
    call the head at the same time. All ranks make the same update of the whole table, from (h, ids, coefficients). The
    tables start with the numbers of rank 0. DistributedDataParallel leaves parameters and buffers of these heads alone:
    it reads their names from the module that it wraps, so that must be `module` itself.

    `nn.Embedding(sparse=True)` in `module` takes part, also with the table of a head: its row gradients are exchanged
    in the backward of every training step, in which every rank must use it.

    In evaluation mode nothing is exchanged: each rank answers for its own rows.

    Args:
        module: the model that is to be wrapped, or a head beside a wrapped encoder.
        mesh_or_group: a `DeviceMesh` of one dimension or a process group; None: all ranks.
        encoder: what happens to the gradients of the model before the head: "average" over the ranks, as
            DistributedDataParallel and FSDP2 do, or "sum".
        batch_capacity: the most rows of a rank in a step; None: the most in the first step. "grow": as many as there
            are, for batches of different sizes; on a GPU the host then waits for the sizes in every step.

    Returns:
        `module`, changed in place.

    Example:
        >>> import torch, torch.distributed as dist, samplex_cuda as sx
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> head = sx.distributed.replicate(head, encoder="average")
        >>> head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
        >>> head(torch.randn(4, 8), torch.arange(4)).backward()
        >>> dist.destroy_process_group()
    """
    heads = {}
    if isinstance(module, nn.Module):
        heads = {name: head for name, head in module.named_modules() if isinstance(head, SampledClassifier)}
    known = group_of(mesh_or_group, _NAME) if dist.is_available() and dist.is_initialized() else None
    given: dict[str, Any] = {"encoder": encoder, "batch_capacity": batch_capacity, "heads": sorted(heads)}
    for name, head in heads.items():
        given |= {f"{name}.{field}" if name else field: value for field, value in whole_settings(head).items()}
    with agreed(_NAME, known, given):
        check_choice(_NAME, "encoder", encoder, ENCODERS)
        if not (batch_capacity is None or batch_capacity == "grow"):
            check_int(_NAME, "batch_capacity", batch_capacity)
        if not isinstance(module, nn.Module) or isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"{_NAME}: module must be the module that DistributedDataParallel will wrap, got "
                f"{type(module).__name__}"
            )
        if not heads:
            raise ValueError(f"{_NAME}: module must hold a SampledClassifier, got {type(module).__name__}")
        for head in heads.values():
            _check_head(head)
        embeddings = sparse_embeddings(module)
        tables = {id(head.weight) for head in heads.values()}
        for name, other in module.named_modules():
            if other in heads.values() or other in embeddings:
                continue
            if any(id(p) in tables for p in other.parameters(recurse=False)):
                raise ValueError(
                    f"{_NAME}: module must share a class table with nn.Embedding(sparse=True) only, got {name} "
                    f"({type(other).__name__}), whose gradient is dense"
                )
        group = group_of(mesh_or_group, _NAME)
        for head in heads.values():
            check_backend(_NAME, group, head.weight.device)
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    first = dist.get_global_rank(group, 0)
    for name, head in heads.items():
        prefix = f"{name}." if name else ""
        own = dict(head.named_parameters(recurse=False)) | dict(head.named_buffers())
        ignored |= {f"{prefix}{which}" for which in own}
        of_batch = head.sampler.buffers() if getattr(head.sampler, "takes_targets", False) else ()
        for value in (*own.values(), *of_batch):
            dist.broadcast(value.detach(), first, group=group)
        capacity = batch_capacity if isinstance(batch_capacity, int) else None
        head._replica = Replica(Exchange(group, capacity, _NAME, batch_capacity == "grow"), encoder)
        head.mark_changed()
    share_embeddings(embeddings, group, encoder)
    tables |= {id(one.weight) for one in embeddings}
    ignored |= {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in tables}
    module._ddp_params_and_buffers_to_ignore = sorted(ignored)  # type: ignore[assignment]
    return module


def _check_head(head: SampledClassifier) -> None:
    if hasattr(head, "layout"):
        raise ValueError(f"{_NAME}: heads must not be sharded, got a {type(head).__name__}, which needs no replicate()")
    refuse_head(head, _NAME)
    if not head.loss.needs.draws:
        raise ValueError(
            f"{_NAME}: loss must sample classes, got {head.loss!r}, whose gradient is dense: DistributedDataParallel "
            "supports it without replicate()"
        )
    if head.weight.is_meta:
        raise ValueError(f"{_NAME}: heads must have values, got one on the meta device; call head.to_empty() first")
    if head.reduction == "none":
        raise ValueError(f'{_NAME}: reduction must be "mean" or "sum", got "none"')
    extra = getattr(head.sampler, "extra", None) if getattr(head.sampler, "takes_targets", False) else None
    if getattr(head.sampler, "group", None) is not None or getattr(extra, "conditional", False):
        raise ValueError(
            f"{_NAME}: an InBatch sampler must have group=None, since a replicated head takes the targets of all ranks "
            "by itself, and an extra sampler with one distribution for all rows, got "
            + (f"extra={type(extra).__name__}" if getattr(extra, "conditional", False) else "a process group")
        )
    if not head.sparse and head.fused is None:
        raise ValueError(
            f"{_NAME}: heads must have sparse=True or a fused optimizer, got dense gradients, which "
            "DistributedDataParallel exchanges by itself"
        )


class Replica:
    """The training step of a plain head whose table every rank has; made by `replicate`.

    Args:
        exchange: the collectives.
        encoder: "average" or "sum".
    """

    def __init__(self, exchange: Exchange, encoder: str) -> None:
        self.exchange, self.encoder = exchange, encoder
        self._known: tuple[LossSpec, int] | None = None  # a resolved step and the digest of its settings
        self._agreed: LossSpec | None = None  # a resolved step whose settings the ranks have compared
        self.rows: Tensor | None = None  # [], of all ranks in the last step

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a head has another table and is not replicated."""
        return type(None), ()

    def loss(
        self,
        head: SampledClassifier,
        h: Tensor,
        y: Tensor,
        features: Tensor | None,
        index: Tensor | None,
        context: Any,
        sample_weight: Tensor | None,
        positives: tuple[Tensor, Tensor] | None,
        key: Key | Tensor | None,
        negatives: Any = None,
        target_weight: Tensor | None = None,
        hard: Tensor | None = None,
    ) -> Tensor:
        """The loss of the rows of all ranks; arguments as in `SampledClassifier.forward`.

        Returns:
            [], the same on every rank.
        """
        more = {
            "negatives": negatives, "hard": hard, "features": features, "index": index, "context": context,
            "sample_weight": sample_weight, "target_weight": target_weight, "positives": positives, "key": key,
        }  # fmt: skip
        return self._loss(head, h, y, more)

    def _digest(self, head: SampledClassifier) -> int:
        spec = head.spec()
        if self._known is None or self._known[0] is not spec:
            self._known = spec, digest(settings_of(head))
        return self._known[1]

    def _loss(
        self, head: SampledClassifier, h: Tensor, y: Tensor, more: dict[str, Any], refused: bool = False
    ) -> Tensor:
        """`loss` with its further arguments in `more`; `refused`: of no rows, in place of a batch that was wrong."""
        negatives, hard, features, index, context, sample_weight, target_weight, positives, key = (
            more[name]
            for name in ("negatives", "hard", "features", "index", "context", "sample_weight", "target_weight",
                         "positives", "key")
        )  # fmt: skip
        exchange, weight = self.exchange, head.weight
        grad = torch.is_grad_enabled()
        targets = y.shape[-1] if isinstance(y, Tensor) and isinstance(h, Tensor) and y.dim() == h.dim() else 1
        given = [int(t is not None) for t in (negatives, target_weight)]
        each = hard.shape[-1] + 1 if isinstance(hard, Tensor) and hard.dim() else 0  # hard negatives of a row
        spec, number = head.spec(), self._digest(head)
        waits = _device.host_waits(weight)
        if waits and self._agreed is not None and self._agreed is not spec:  # nobody looks at headers
            agree(settings_of(head), exchange.group, op=_NAME)
        self._agreed = spec
        form = [number, int(grad), targets, *given, each]
        nothing = torch.zeros(2, dtype=torch.int64, device=weight.device)
        try:
            self._check(head)
            rows, target, lead = head._check_batch(h, y, features, sample_weight, positives)
            of_example = head._check_index(index, lead) if spec.needs.example_index else None
            if rows.dtype is not weight.dtype or rows.device != weight.device:
                rows = like_weight(rows, weight)
            if not _device.host_waits(target):
                head._refuse_targets(target)
            exchange.check_rows(_NAME, rows.shape[0])
            shares = target_shares(head, target_weight, y, target)
            mine = None if negatives is None else own_draw(head, negatives, target, lead)
            mined = None if hard is None else own_draw(head, hard, target, lead, hard=True)
            pair = exchange.key(_NAME, key, weight.device)
        except BaseException:
            if not waits:
                exchange.meet(0, form, nothing, refused=True)
            elif not refused and exchange.world > 1:
                # The others do not look and go on: this rank takes part without a row.
                self._loss(head, *without_rows(head, h, y, more), refused=True)
            raise
        everyone = exchange.meet(
            rows.shape[0], form, pair, width=0 if mine is None else mine.ids.shape[1], refused=refused,
            settings=partial(settings_of, head),
        )  # fmt: skip
        if mine is not None:
            mine = widened(head, mine, negatives, everyone.width, target, lead)
        weights = None if sample_weight is None else sample_weight.reshape(-1)
        with torch.no_grad():
            if head.follower.active:
                head._follow(weight, head.bias, rows.shape[0])
            # Merged draws are fewer on some ranks: with hard negatives beside them they must be as many on all.
            law = spec if mined is None else spec._replace(merges=False)
            drawn: tuple[Draw, Tensor | None]
            drawn = (
                (mine, None) if mine is not None else self._draw(head, law, everyone, rows, target, features, context)
            )
            if mined is not None:
                ids, log_q = joined(drawn[0].ids, drawn[0].log_q, mined.ids)
                drawn = (Draw(ids, log_q, False), drawn[1])
            query = head._query(rows.detach())
            part = self._own(head, spec, query, target, of_example, weights, positives, drawn, shares)
            part["common"] = drawn[0].ids if mine is None and self._common(head) else None
            step = self._exchange(head, spec, everyone, part, of_example, grad).unless(everyone.lost)
        if not grad:
            return step.loss
        sink = head.fused or head._rows_of(weight, head.bias)
        step = step._replace(project=head.normalize)
        return run_step(fixed_query(head, rows), weight, head.bias, step, sink, spec.loss.name, head.log_scale)

    def _draw(
        self,
        head: SampledClassifier,
        spec: LossSpec,
        everyone: Everyone,
        rows: Tensor,
        target: Tensor,
        features: Tensor | None,
        context: Any,
    ) -> tuple[Draw, Tensor | None]:
        """The draws of this rank's rows, from the key of the first rank; those of a batch from all targets."""
        sampler: Any = head.sampler
        if not getattr(sampler, "takes_targets", False):
            key = everyone.key if self._common(head) else key_of_rows(sampler, everyone, self.exchange.rank)
            return head._draw(spec, rows, target, features, context, key)
        # The targets of all ranks, and one draw of the second sampler for all of them.
        (targets,) = self.exchange.gather(everyone, [target], [head.ignore_index])
        return head._draw(spec, rows, targets, features, context, everyone.key)

    @staticmethod
    def _common(head: SampledClassifier) -> bool:
        """Whether the ranks share their draws: those of a batch, or shared ones that do not depend on the rows."""
        sampler: Any = head.sampler
        return getattr(sampler, "takes_targets", False) or (head.shared and not getattr(sampler, "conditional", True))

    def _check(self, head: SampledClassifier) -> None:
        """What may have been changed since `replicate`."""
        _check_head(head)
        if inside_ddp(head):
            active: Any = nn.parallel.DistributedDataParallel._active_ddp_module
            for name, p in active.module.named_parameters():
                if p is head.weight and name not in active.parameters_to_ignore:
                    raise RuntimeError(
                        f"{_NAME}: DistributedDataParallel must ignore {name}; call replicate on the module that it "
                        "wraps, before wrapping it"
                    )
        if head.fused is not None and head.fused.optimizer.key is None:
            for group in head.fused.optimizer.param_groups:
                if group["stochastic_rounding"] and head.weight.dtype in (torch.float16, torch.bfloat16):
                    raise ValueError(
                        f"{_NAME}: an optimizer with stochastic_rounding=True must have a key, the same on every rank, "
                        "or their tables diverge; got key=None: pass key=sx.Key(seed)"
                    )

    def _own(
        self,
        head: SampledClassifier,
        spec: LossSpec,
        rows: Tensor,
        target: Tensor,
        number: Tensor | None,
        weights: Tensor | None,
        positives: tuple[Tensor, Tensor] | None,
        drawn: tuple[Draw, Tensor | None],
        shares: Tensor | None,
    ) -> dict[str, Any]:
        """This rank's rows by themselves: the sum of their losses, its gradients, and what they weigh in a mean."""
        weight, bias = head.weight, head.bias
        draw, target_log_q = drawn
        offsets, known = (None, None)
        if positives is not None:
            offsets, known = known_positives(spec.loss.name, positives, rows.shape[0], weight.device)
        state = None if number is None or head._state_name is None else head.get_buffer(head._state_name)
        used = None if state is None else state[number]
        log_q = draw.log_q if weight.dtype is not torch.float64 else draw.log_q.double()
        x = Inputs(
            rows.contiguous(), weight.detach(), None if bias is None else bias.detach(), target.contiguous(), draw.ids,
            log_q, head.class_weight, offsets, known, target_log_q, used, target_weight=shares,
        )  # fmt: skip
        form = spec.form._replace(reduction=REDUCTIONS["none"])
        try:
            made = spec.loss.forward(x, form, True, True)
        except RuntimeError as error:
            raise op_error(error) from None
        plan = Plan(
            spec.loss.name, head.num_classes, weight.dtype, None if bias is None else bias.dtype, form.reduction, False,
            made.ratio is not None, head.normalize,
        )  # fmt: skip
        upstream = torch.ones_like(made.loss) if weights is None else weights.to(made.loss.dtype)
        with_bias = bias is not None and bias.requires_grad
        grad = LossGrad(plan, x.hidden, x.target, x.ids, made.saved, upstream.contiguous(), None)
        d_hidden, found = entries(grad, with_bias)
        counts = (
            mean_weight(target, head._valid(target), None if shares is not None else head.class_weight).to(
                made.loss.dtype
            )
            * upstream
        )
        sums = torch.stack([(made.loss * upstream).sum(), counts.sum(), counts.new_full((), rows.shape[0])])
        if head.log_scale is not None:  # what it adds to the derivative by the logarithm of the scale
            sums = torch.cat([sums, (d_hidden * rows.to(d_hidden.dtype)).sum().to(sums.dtype).reshape(1)])
        return {"entries": found, "d_hidden": d_hidden, "sums": sums, "used": used, "extra": made.ratio}

    def _exchange(
        self,
        head: SampledClassifier,
        spec: LossSpec,
        everyone: Everyone,
        part: dict[str, Any],
        number: Tensor | None,
        grad: bool,
    ) -> StepResult:
        """The parts of all ranks as one step: everything that is sent is sent here."""
        exchange = self.exchange
        e: Entries = part["entries"]
        total = exchange.stack(part["sums"]).sum(0)
        loss, scale = total[0], torch.ones_like(total[0])
        self.rows = total[2]
        if head.reduction == "mean":
            scale = torch.where(total[1] == 0, 0.0, 1.0 / torch.where(total[1] == 0, 1.0, total[1]))
            loss = loss * scale
        fields: dict[str, Tensor] = {}
        if grad or head.follower.active:
            targets = e.ids_a.unsqueeze(1) if e.ids_a.dim() == 1 else e.ids_a
            fields = {"h": e.rows_a, "target": targets.to(torch.int64), "coef_a": e.coef_a}
            if e.ids_b.dim() == 2:
                fields |= {"ids": e.ids_b, "coef_b": e.coef_b}
        if number is not None and part["extra"] is not None:
            fields |= {"index": number, "used": part["used"], "extra": part["extra"]}
        if not fields:
            return StepResult(loss, partial(times, e), part["d_hidden"])
        pads = [-1 if name in ("target", "ids") else 0 for name in fields]
        found = dict(zip(fields, exchange.gather(everyone, list(fields.values()), pads), strict=True))
        if "index" in found:
            state, extra = head.get_buffer(str(head._state_name)), found["extra"]
            if everyone.lost is not None:
                extra = torch.where(everyone.lost, torch.nan, extra)  # leaves the number of an example as it is
            spec.loss.update_state(state, found["index"], found["used"], extra)
        if "h" not in found:
            return StepResult(loss, partial(times, e), part["d_hidden"])
        ids, coef_b, rows_b, bias_b = found.get("ids"), found.get("coef_b"), found["h"], None
        if e.ids_b.dim() == 1:
            ids, coef_b, rows_b, bias_b = self._shared(head, e, part["common"])
        assert ids is not None
        assert coef_b is not None
        if head.follower.active:
            target = found["target"]
            head.follower.touch(torch.where(head._valid(target), target, -1).reshape(-1), ids.reshape(-1))
        factor = scale * exchange.world if self.encoder == "average" else scale
        whole = Entries(
            found["target"], found["coef_a"] * scale, found["h"], ids, coef_b * scale, rows_b,
            None if bias_b is None else bias_b * scale,
        )  # fmt: skip
        d_hidden = part["d_hidden"].to(scale.dtype) * factor
        of_scale = None if head.log_scale is None else total[3] * scale
        return StepResult(loss, partial(times, whole), d_hidden, of_scale=of_scale)

    def _shared(
        self, head: SampledClassifier, e: Entries, common: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Ids, coefficients, rows and bias gradients of the shared draws of all ranks, m of each rank.

        Draws that were merged leave fewer than m; a rank without a row has none: ids of -1 fill up. Draws that the
        ranks share need no ids, and their gradients are summed where they are.
        """
        exchange, most = self.exchange, head.num_samples
        count = e.ids_b.shape[0]
        if common is not None:
            with_bias = head.bias is not None and head.bias.requires_grad
            summed = e.rows_b.new_zeros(common.shape[0], head.in_features + with_bias)
            if count:
                summed[:, : head.in_features] = e.rows_b * (1.0 if e.coef_b.numel() == 0 else e.coef_b)
            if count and e.bias_b is not None:
                summed[:, -1] = e.bias_b
            exchange.sum_(summed)
            values = summed[:, : head.in_features].contiguous()
            bias = summed[:, -1].contiguous() if with_bias else None
            return common, torch.ones_like(values[:, :1]), values, bias
        rows = e.rows_b.new_zeros(most, head.in_features + 1)
        ids = torch.full((most,), -1, dtype=torch.int64, device=rows.device)
        rows[:count, :-1] = e.rows_b[:count] * (1.0 if e.coef_b.numel() == 0 else e.coef_b[:count])
        ids[:count] = e.ids_b
        if e.bias_b is not None:
            rows[:count, -1] = e.bias_b
        width = rows if e.bias_b is not None or head.bias is not None else rows[:, :-1].contiguous()
        found = exchange.stack(width).reshape(exchange.world * most, -1)
        all_ids = exchange.stack(ids).reshape(-1)
        bias = found[:, -1].contiguous() if found.shape[1] > head.in_features else None
        values = found[:, : head.in_features].contiguous()
        return all_ids, torch.ones_like(values[:, :1]), values, bias
