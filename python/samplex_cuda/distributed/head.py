"""`head.shard(...)`: a `SampledClassifier` whose class table is spread over the ranks of a process group."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from samplex_cuda import _device
from samplex_cuda._checks import check_choice, check_int, describe
from samplex_cuda.distributed.answers import ShardedAnswers
from samplex_cuda.distributed.collectives import ENCODERS, Everyone, Exchange, check_backend, group_of
from samplex_cuda.distributed.examples import ExampleShard
from samplex_cuda.distributed.follow import due_state, follow_table, shard_sampler
from samplex_cuda.distributed.full import full_step
from samplex_cuda.distributed.health import agree
from samplex_cuda.distributed.layout import Layout
from samplex_cuda.distributed.online import online_softmax
from samplex_cuda.distributed.own_rows import OWN_ROWS, own_rows_step
from samplex_cuda.distributed.routes import refuse_unfit, resolve_route
from samplex_cuda.distributed.rows import (
    fixed_query,
    inverse_at,
    joined,
    own_draw,
    refuse_head,
    target_shares,
    widened,
    with_margin,
    without_rows,
)
from samplex_cuda.distributed.samplers import ShardedSampler, as_dtensor
from samplex_cuda.distributed.settings import agreed, digest, settings_of, whole_settings
from samplex_cuda.distributed.step import (
    StepResult,
    logits_of,
    loss_of_logits,
    partial_hidden,
    row_scaled,
    run_step,
    scaled,
    slope_of_scale,
)
from samplex_cuda.draw import Draw, Negatives
from samplex_cuda.functional._inputs import known_positives
from samplex_cuda.heads.checks import inside_ddp, like_weight
from samplex_cuda.heads.classifier import LossSpec, SampledClassifier
from samplex_cuda.optim.base import set_first_row
from samplex_cuda.rng import Key, uniform_at
from samplex_cuda.tables import empty_table

__all__ = ["ShardedClassifier"]

_NAME = "SampledClassifier.shard"
_FILL = 1 << 17  # numbers of a table that are made at once: malloc keeps what larger pieces leave behind


class ShardedClassifier(ShardedAnswers):
    """A head whose class rows are spread over ranks; made by `SampledClassifier.shard`.

    Every rank calls it with its own batch, at the same time, and gets the loss of all of them: the mean over all rows,
    however many each rank has; with `reduction="none"` the losses of all rows, in the order of the ranks. `weight`
    [n, d] and `bias` [n] are this rank's rows, in the order of `layout.classes()`.

    Args:
        head: the head as it would be on one rank; on the meta device, no rank ever holds the whole table.
        mesh_or_group: over which ranks; None: all of them.
        batch_capacity: the most rows of a rank in a step; None: the most in the first step.
        order: "class" or "spread"; see `Layout`.
        encoder: what happens to the gradients of the model before the head: "average" over the ranks, as
            DistributedDataParallel and FSDP2 do, or "sum".
        route: how queries and class rows meet; see `samplex_cuda.distributed.routes`.
        key: what the rows of a head on the meta device are made from; by default torch's generator on the first rank.
        device: of the rows, for a head on the meta device.
        sampler: "replicate", "shard" or "auto"; see `SampledClassifier.shard`.
    """

    def __init__(
        self,
        head: SampledClassifier,
        mesh_or_group: Any = None,
        *,
        encoder: str,
        batch_capacity: int | None = None,
        order: str = "class",
        route: str = "summed_logits",
        key: Key | Tensor | None = None,
        device: torch.device | str | None = None,
        sampler: str = "auto",
    ) -> None:
        known = group_of(mesh_or_group) if dist.is_available() and dist.is_initialized() else None
        given = {"encoder": encoder, "batch_capacity": batch_capacity, "order": order, "route": route,
                 "device": None if device is None else str(device), "shard(sampler)": sampler}  # fmt: skip
        with agreed(_NAME, known, whole_settings(head) | given):
            if batch_capacity is not None:
                check_int(_NAME, "batch_capacity", batch_capacity)
            check_choice(_NAME, "encoder", encoder, ENCODERS)
            refuse_head(head, _NAME)
            if head.fused is not None:
                raise ValueError(
                    f"{_NAME}: head must not be fused yet, got a fused head; shard it first, then fuse its optimizer"
                )
            group = group_of(mesh_or_group)
            whole = not head.weight.is_meta
            place = head.weight.device if whole else torch.device("cpu" if device is None else device)
            check_backend(_NAME, group, place)
        exchange = Exchange(group, batch_capacity)
        layout = Layout(head.num_classes, exchange.world, exchange.rank, order)
        whole_law = head.loss.needs.prior or head.stratified
        made = shard_sampler(head.sampler, sampler, layout, exchange, place, whole_law, bool(head.unique))
        for name, t in () if made is None or made is not head.sampler else made.named_buffers():
            if t.device.type != place.type:
                raise ValueError(
                    f"{_NAME}: sampler must be on {place}, as the rows, got {name} on {t.device}; move it first"
                )
        balanced = order == "spread" or place.type == "cpu"
        route = resolve_route(route, head, exchange.world, batch_capacity, balanced, made)
        super().__init__(
            head.in_features,
            head.num_classes,
            made,
            head.num_samples or None,
            head.loss,
            head.bias is not None,
            shared=head.shared,
            stratified=head.stratified,
            unique=head.unique,
            scale=head.scale if head.log_scale is None else head.first_scale,
            normalize=head.normalize,
            learn_scale=head.log_scale is not None,
            ignore_index=head.ignore_index,
            sparse=head.sparse,
            reduction=head.reduction,
            sampler_update=head.follower.policy,
            device="meta",
            dtype=head.weight.dtype,
        )
        self.encoder, self.route = encoder, route
        self._mesh: DeviceMesh | None = None
        self.exchange, self.layout = exchange, layout
        self.follower.auto = head.follower.auto
        self.weight = nn.Parameter(
            empty_table(self.layout.rows, head.in_features, device=place, dtype=head.weight.dtype)
        )
        set_first_row(self.weight, self.layout.start)
        if head.bias is not None:
            self.bias = nn.Parameter(torch.empty(self.layout.rows, device=place, dtype=head.bias.dtype))
            set_first_row(self.bias, self.layout.start)
        if head.log_scale is not None:
            start = torch.full((), math.log(head.first_scale), device=place, dtype=self._wide())
            start = start if head.log_scale.is_meta else head.log_scale.detach().to(place)
            self.log_scale = nn.Parameter(exchange.stack(start)[0])
        self.class_weight = None if head.class_weight is None else head.class_weight.to(place)
        if self._state_name is not None:
            state = head.loss.example_state(head.num_classes)
            assert state is not None
            kept = head.get_buffer(self._state_name)
            self._examples = ExampleShard(state, self.exchange)
            mine = self._examples.make(None if kept.is_meta else kept, place, self._wide())
            setattr(self, self._state_name, mine)
        self.training = head.training
        if whole:
            self._take_rows(head)
        else:
            self._fill(self.exchange.stack(self.exchange.key(_NAME, key, place))[0])
        self._attach(self.sampler, head)
        if getattr(self.sampler, "unfilled", False):
            self.update_sampler()
        self._known: tuple[LossSpec, int] | None = None  # a resolved step and the digest of its settings
        self._agreed: LossSpec | None = self.spec()  # a resolved step whose settings the ranks have compared

    def _attach(self, sampler: Any, whole: SampledClassifier) -> None:
        """Lets a sampler that read the table of `whole` read that of this rank."""
        if hasattr(sampler, "attach"):
            sampler.attach((whole.weight, whole.bias), self.weight, self.bias)

    @torch.no_grad()
    def _take_rows(self, head: SampledClassifier) -> None:
        classes = self.layout.classes(self.weight.device)
        self.weight.copy_(head.weight[classes])
        if self.bias is not None and head.bias is not None:
            self.bias.copy_(head.bias[classes])

    @torch.no_grad()
    def _fill(self, pair: Tensor) -> None:
        """Initial values of `nn.Linear` in distribution, each a function of the key, the class and the column."""
        width = self.in_features
        bound, numbers = 1.0 / math.sqrt(width), width + (self.bias is not None)
        columns = torch.arange(width, device=pair.device)
        for begin in range(0, self.layout.rows, max(1, _FILL // width)):
            classes = self.layout.classes(pair.device, begin, begin + max(1, _FILL // width)) * numbers
            made = uniform_at(pair, classes.unsqueeze(1) + columns)
            self.weight[begin : begin + len(classes)] = (2.0 * made - 1.0) * bound
            if self.bias is not None:
                self.bias[begin : begin + len(classes)] = (2.0 * uniform_at(pair, classes + width) - 1.0) * bound

    def reset_parameters(self) -> None:
        """Nothing: the constructor fills the rows."""

    def _resolve(self) -> LossSpec:
        """As in `SampledClassifier`; a changed setting must fit the route."""
        route = self.__dict__.get("route")
        if route is not None:
            refuse_unfit(route, self)
        return super()._resolve()

    def _digest(self) -> int:
        """The digest of the settings of a step, computed again when the head has resolved it again."""
        spec = self.spec()
        if self._known is None or self._known[0] is not spec:
            self._known = spec, digest(settings_of(self))
        return self._known[1]

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
        """The loss of the rows of all ranks: sampled in training mode, exact otherwise. Every rank must call it.

        Args:
            h: [*, d], this rank's rows; there may be none.
            y: int64 [*] or [*, P].
            negatives: as in `SampledClassifier.forward`, of this rank's rows, all of which bring some or none; those
                for all rows of a rank, [m], are for the rows of this rank.
            hard: as there, of this rank's rows; every rank brings as many for a row, or none.
            features: as in `SampledClassifier.forward`.
            index: as there.
            context: int64 [*], or None.
            sample_weight: as there.
            target_weight: as there.
            positives: as there.
            key: as there; that of the first rank counts.

        Returns:
            fp32 scalar (fp64 with fp64 parameters), the same on every rank; with `reduction="none"` [R], a loss for
            each row of all ranks, in their order (on a GPU `batch_capacity` rows of each rank, the unused ones behind
            all others and 0). What follows must be the same on every rank, so that all send back the same gradient.
        """
        if inside_ddp(self):
            raise RuntimeError(
                f"{_NAME}: a sharded head must not be inside DistributedDataParallel, which gives every rank the rows "
                "of rank 0: wrap the encoder alone, and make a new head"
            )
        more = {
            "negatives": negatives, "hard": hard, "features": features, "index": index, "context": context,
            "sample_weight": sample_weight, "target_weight": target_weight, "positives": positives, "key": key,
        }  # fmt: skip
        return self._forward(h, y, more)

    def _forward(self, h: Tensor, y: Tensor, more: dict[str, Any], refused: bool = False) -> Tensor:
        """`forward` with its further arguments in `more`; `refused`: of no rows, in place of a batch that was wrong."""
        negatives, hard, features, index, context, sample_weight, target_weight, positives, key = (
            more[name]
            for name in ("negatives", "hard", "features", "index", "context", "sample_weight", "target_weight",
                         "positives", "key")
        )  # fmt: skip
        grad = torch.is_grad_enabled()
        negatives = negatives if self.training else None
        given = [t is not None for t in (features, index, context, sample_weight, target_weight, negatives)]
        targets = y.shape[-1] if isinstance(y, Tensor) and isinstance(h, Tensor) and y.dim() == h.dim() else 0
        due = due_state(self.follower, self.sampler, self.weight, self.bias) if self.training else 0
        hard = hard if self.training else None
        each = hard.shape[-1] + 1 if isinstance(hard, Tensor) and hard.dim() else 0  # hard negatives of a row
        waits, alike = _device.host_waits(self.weight), 0
        wrong: Exception | None = None
        try:
            alike = self._digest()
        except Exception as error:  # settings that do not fit together: the other ranks must hear of it
            wrong = error
        if waits and (wrong is not None or self._agreed is not self.spec()):  # nobody looks at headers
            agree(settings_of(self), self.exchange.group, op=_NAME, error=wrong)
            self._agreed = self.spec()
        form = [alike, int(self.training), int(grad), targets, *map(int, given), due, each]
        try:
            if wrong is not None:
                raise wrong
            rows, target, lead = self._check_batch(h, y, features, sample_weight, positives)
            rows = like_weight(rows, self.weight) if rows.dtype is not self.weight.dtype else rows
            if not _device.host_waits(target):
                self._refuse_targets(target)
            number = self._check_index(index, lead) if index is not None else None
            self.exchange.check_rows(_NAME, rows.shape[0])
            self._refuse_off_route(positives=positives, negatives=negatives, hard=hard, target_weight=target_weight)
            shares = target_shares(self, target_weight, y, target)
            own = None if negatives is None else own_draw(self, negatives, target, lead)
            mined = None if hard is None else own_draw(self, hard, target, lead, hard=True)
            if isinstance(context, Tensor):
                context = context.reshape(rows.shape[0], *context.shape[len(lead) :])
            elif context is not None:
                raise TypeError(f"{_NAME}: context must be a tensor with one row per row of h, got {describe(context)}")
            pair = torch.zeros(2, dtype=torch.int64, device=self.weight.device)
            if self.loss.needs.draws:
                pair = self.exchange.key(_NAME, key, self.weight.device)
        except BaseException:
            if not waits:
                nothing = torch.zeros(2, dtype=torch.int64, device=self.weight.device)
                self.exchange.meet(0, form, nothing, refused=True)
            elif not refused and self.exchange.world > 1:
                # The others do not look and go on: this rank takes part without a row.
                self._forward(*without_rows(self, h, y, more), refused=True)
            raise
        target = target.unsqueeze(1) if target.dim() == 1 else target
        fields: dict[str, Tensor] = {"h": rows.detach(), "y": target}
        if number is not None:
            fields["index"] = number
        if sample_weight is not None:
            fields["sample_weight"] = sample_weight.reshape(-1).to(self._wide())
        if shares is not None:
            fields["target_weight"] = shares.reshape(target.shape)
        if mined is not None:
            fields["hard"] = mined.ids
        # What follows from the form can travel with it.
        known = own is None and features is None and context is None and not (self.training and self.route in OWN_ROWS)
        everyone = self.exchange.meet(
            rows.shape[0], form, pair, width=0 if own is None else own.ids.shape[1],
            fields=list(fields.values()) if known else None, pads=self._pads(fields), refused=refused,
            settings=partial(settings_of, self),
        )  # fmt: skip
        if self.training and self.follower.auto:
            most = self.exchange.world * (self.exchange.capacity or 1)
            self.follower.settle(self.sampler, most, self.num_samples, self.shared)
        if features is not None:
            fields["features"] = self._seen(rows, features)
        if context is not None:
            fields["context"] = context
        if own is not None:
            own = widened(self, own, negatives, everyone.width, target, lead)
            fields |= {"negatives": own.ids, "log_q": own.log_q}
        if self.training and self.route in OWN_ROWS:
            with torch.no_grad():
                step = own_rows_step(self, self.spec(), everyone, fields).unless(everyone.lost)
            if not grad:
                return step.loss
            sink = self._fusion or self._rows_of(self.weight, self.bias)
            return run_step(rows, self.weight, self.bias, step, sink, self.loss.name)
        parts = everyone.batch or self.exchange.gather(everyone, list(fields.values()), self._pads(fields))
        found = dict(zip(fields, parts, strict=True))
        if not self.training:
            loss = self._exact(found)
            return loss if everyone.lost is None else torch.where(everyone.lost, torch.nan, loss)
        if not self.loss.needs.draws:
            return full_step(self, everyone, found, rows, grad)
        if due:
            self.update_sampler()
        return self._step(self.spec(), everyone, found, rows, positives, grad)

    def _step(
        self,
        spec: LossSpec,
        everyone: Everyone,
        batch: dict[str, Tensor],
        rows: Tensor,
        positives: tuple[Tensor, Tensor] | None,
        grad: bool,
    ) -> Tensor:
        weight, bias, exchange = self.weight, self.bias, self.exchange
        h, target = batch["h"], batch["y"]
        with torch.no_grad():
            draw, target_log_q = self._all_draws(spec, everyone, batch)
            # Rows of their own beside the targets, so that draws may be shared all the same.
            own = target if "hard" not in batch else torch.cat([target, batch["hard"]], 1)
            if self.follower.active:
                self.follower.touch(torch.where(self._valid(own), own, -1).reshape(-1), draw.ids.reshape(-1))
            known = bias if bias is None else bias.detach()
            table, targets, loss_of = weight.detach(), target.shape[1], spec.loss
            query = self._query(h)
            logits, of_target, of_draws = logits_of(query, table, known, own, draw.ids, self.layout)
            lengths = None
            if self.normalize:
                lengths = inverse_at(table, of_target), inverse_at(table, of_draws)
                logits[:, : own.shape[1]] *= lengths[0]
                logits[:, own.shape[1] :] *= lengths[1]
            log_q = draw.log_q.double() if weight.dtype is torch.float64 else draw.log_q
            ids, log_q = joined(draw.ids, log_q, own[:, targets:])
            of_scale = None
            weights = batch.get("sample_weight")
            state = None if self._state_name is None else self.get_buffer(self._state_name)
            used = None if state is None else self._examples.fetch(state, batch["index"])
            if self.route == "online_softmax":
                coefs = online_softmax(
                    exchange, everyone, spec.form, spec.loss.absolute, logits, target, ids, log_q, of_target,
                    of_draws, self.class_weight, weights, self.reduction,
                )  # fmt: skip
                loss = coefs.loss
            else:
                if positives is not None:
                    self._mask(logits, ids, everyone, positives, targets)
                exchange.sum_(logits)
                length = 1.0 if self.log_scale is None else self.log_scale.exp()
                loss_of, logits[:, :targets], slope = with_margin(loss_of, logits[:, :targets], length)
                form = (spec.form if weights is None else spec.rows)._replace(normalize=False)  # it has been done
                of_targets = None if target_log_q is None else target_log_q.reshape(target.shape)
                shares = batch.get("target_weight")
                coefs = loss_of_logits(
                    loss_of, form, logits, target, ids, log_q, self.class_weight, of_targets, used, grad, shares
                )
                loss = coefs.loss
                if weights is not None:
                    loss, factor = self._weighted(loss, target, weights, shares is not None)
                    coefs = coefs._replace(target=coefs.target * factor, draws=coefs.draws * factor)
                if self.log_scale is not None and grad:
                    of_scale = slope_of_scale(coefs, logits)
                if slope is not None and grad:
                    coefs = coefs._replace(target=coefs.target * slope)
            if state is not None and used is not None and coefs.extra is not None:
                index = batch["index"] if everyone.lost is None else torch.where(everyone.lost, -1, batch["index"])
                self._examples.move(spec.loss, state, index, used, coefs.extra)
            if not grad:
                return loss if everyone.lost is None else torch.where(everyone.lost, torch.nan, loss)
            if own.shape[1] > targets:
                both, more = torch.cat([coefs.target, coefs.draws], 1), own.shape[1]
                coefs = coefs._replace(target=both[:, :more].contiguous(), draws=both[:, more:].contiguous())
            if lengths is not None:
                coefs = coefs._replace(target=coefs.target * lengths[0], draws=coefs.draws * lengths[1])
            partial = partial_hidden(table, coefs, of_target, of_draws)
            d_hidden = exchange.send_home(partial, everyone.place, everyone.rows)
            if self.encoder == "average":
                d_hidden *= exchange.world
            with_bias = bias is not None and bias.requires_grad
            make = row_scaled if self.reduction == "none" else scaled
            found = make(coefs, query, of_target, of_draws, with_bias)
        step = StepResult(loss, found, d_hidden, exchange, everyone.place, self.normalize, of_scale)
        step = step.unless(everyone.lost)
        sink = self._fusion or self._rows_of(weight, bias)
        return run_step(fixed_query(self, rows), weight, bias, step, sink, spec.loss.name, self.log_scale)

    def _pads(self, fields: dict[str, Tensor]) -> list[float]:
        """What stands in rows that a rank does not use."""
        return [{"y": self.ignore_index, "index": -1}.get(name, 0) for name in fields]

    def _all_draws(self, spec: LossSpec, everyone: Everyone, batch: dict[str, Tensor]) -> tuple[Draw, Tensor | None]:
        """The negatives of all rows, and log q of the targets if the loss reads it."""
        if "negatives" in batch:
            return Draw(batch["negatives"], batch["log_q"], False), None
        target = batch["y"][:, 0] if batch["y"].shape[1] == 1 else batch["y"]
        return self._draw(spec, batch["h"], target, batch.get("features"), batch.get("context"), everyone.key)

    def _refuse_off_route(self, **given: Any) -> None:
        """ValueError for arguments that only the reference takes."""
        for name, one in given.items():
            if one is not None and self.training and self.route != "summed_logits":
                raise ValueError(
                    f'{_NAME}: {name} must be None with route="{self.route}", got {type(one).__name__}; shard the head '
                    'with route="summed_logits"'
                )

    def _mask(
        self, logits: Tensor, ids: Tensor, everyone: Everyone, positives: tuple[Tensor, Tensor], targets: int
    ) -> None:
        """-inf for draws that are known positives of this rank's rows; the sum over the ranks tells the others."""
        offsets, known = known_positives(self.loss.name, positives, everyone.rows, logits.device)
        drawn = ids.expand(logits.shape[0], -1) if ids.dim() == 1 else ids
        rows = torch.arange(everyone.rows, device=ids.device) + everyone.first
        rows = rows.repeat_interleave(offsets.diff(), output_size=known.shape[0])
        hits = torch.zeros(drawn.shape, dtype=torch.int32, device=ids.device)
        hits.index_add_(0, rows, (drawn[rows] == known.unsqueeze(1)).int())
        logits[:, targets:].masked_fill_(hits > 0, -torch.inf)

    def _weighted(self, loss: Tensor, target: Tensor, weights: Tensor, by_target: bool) -> tuple[Tensor, Tensor]:
        """Row losses [R] weighted and reduced, and what each row's gradient is multiplied by, [R, 1]."""
        row_weight = self._row_weight(target, by_target) * weights
        loss = loss * weights
        if self.reduction == "none":
            return loss, weights.unsqueeze(1)
        loss = loss.sum()
        if self.reduction == "sum":
            return loss, weights.unsqueeze(1)
        total = row_weight.sum()
        safe = torch.where(total == 0, 1.0, total).to(loss.dtype)
        return loss / safe, (weights / safe).unsqueeze(1)

    def set_sampler(
        self, sampler: nn.Module, *, num_samples: int | None = None, update: str | int | None = "auto"
    ) -> None:
        """Give the head another sampler, spread over the ranks as `shard` does. Every rank must call it.

        Args:
            sampler: of all classes, as for a head that is not sharded.
            num_samples: as in `SampledClassifier.set_sampler`.
            update: as there.
        """
        whole, unique = self.loss.needs.prior or self.stratified, bool(self.unique)
        made = shard_sampler(sampler, "auto", self.layout, self.exchange, self.weight.device, whole, unique)
        self._attach(made, self)
        super().set_sampler(made, num_samples=num_samples, update=update)

    def update_sampler(self) -> None:
        """Bring the sampler up to date with the tables of all ranks now. Every rank must call it."""
        follow_table(self.follower, self.sampler, self.weight, self.bias)

    def mark_rows(self, ids: list[Tensor]) -> None:
        """`mark_changed` by rows of this rank's `weight`."""
        self.mark_changed([torch.where(i >= 0, self.layout.class_at(i + self.layout.start), -1) for i in ids])

    # -------------------------------------------------------------------------------------------- as a module
    def as_dtensor(self, rows: Tensor) -> DTensor:
        """Rows [n, ...] of this rank as their part of a [C, ...] DTensor, in the order of slots; nothing is copied."""
        return as_dtensor(rows, self.num_classes, self.mesh)

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks of this head as a mesh of one dimension."""
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.exchange.group, self.weight.device.type)
        return self._mesh

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for module in self.modules():  # a checkpoint knows the rows of class tables by this mesh
            if isinstance(module, ShardedSampler):
                module._mesh = self.mesh
        for name in ("weight", "bias"):
            if f"{prefix}{name}" in destination:
                destination[f"{prefix}{name}"] = self.as_dtensor(destination[f"{prefix}{name}"].detach())
        if self._state_name is not None:
            kept = self.get_buffer(self._state_name).detach()
            destination[f"{prefix}{self._state_name}"] = self._examples.as_dtensor(kept, self.mesh)
        destination[f"{prefix}slot_step"] = torch.tensor([self.layout.step])
        if self.follower.active:
            # Of a fixed size: the rows that the sampler has not seen yet are marked, one byte each.
            lag = destination.pop(f"{prefix}sampler_lag", torch.zeros(2, dtype=torch.int64))
            local = self.layout.local(lag[2:])
            marked = torch.zeros(self.layout.rows, dtype=torch.uint8, device=self.weight.device)
            marked[local[local >= 0].to(marked.device)] = 1
            destination[f"{prefix}sampler_lag"] = lag[:2]
            destination[f"{prefix}sampler_unseen"] = self.as_dtensor(marked)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes the state of a sharded head, as DTensors, or that of a plain one, with whole tables."""
        errors = args[-1]
        step = state_dict.pop(f"{prefix}slot_step", None)
        unseen = state_dict.pop(f"{prefix}sampler_unseen", None)
        if isinstance(unseen, DTensor) and f"{prefix}sampler_lag" in state_dict:
            marked = unseen.redistribute(self.mesh, [Shard(0)]).to_local().nonzero().squeeze(1).cpu()
            lag = state_dict[f"{prefix}sampler_lag"][:2].cpu()
            ids = self.layout.class_at(marked + self.layout.start)
            if _device.host_waits(self.weight):  # as many on every rank: lists have fixed sizes there
                ids = nn.functional.pad(ids, (0, self.layout.chunk - ids.shape[0]), value=-1)
            state_dict[f"{prefix}sampler_lag"] = torch.cat([lag, ids])
        if getattr(self.sampler, "collective", False):
            self.sampler.adopt(state_dict, f"{prefix}sampler.")
        given = {name: state_dict.get(f"{prefix}{name}") for name in ("weight", "bias")}
        for name, value in given.items():
            if not isinstance(value, Tensor):
                continue
            if value.shape[:1] != (self.num_classes,):
                errors.append(
                    f"{_NAME}: {name} must have {self.num_classes} rows, got {describe(value)}: the rows of all ranks, "
                    "as a DTensor or whole"
                )
                return
            if isinstance(value, DTensor):
                if step is None or int(step) != self.layout.step:
                    errors.append(
                        f"{_NAME}: the state dict has its classes in another order than this head, whose order is "
                        f'"{self.layout.order}"; shard it with the order of the save'
                    )
                    return
                rows = value.redistribute(self.mesh, [Shard(0)]).to_local()
            else:
                rows = value[self.layout.classes(value.device)]
            state_dict[f"{prefix}{name}"] = rows
        if self._state_name is not None and not self._load_examples(state_dict, f"{prefix}{self._state_name}", errors):
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _load_examples(self, state_dict: dict[str, Any], name: str, errors: list[str]) -> bool:
        """Replaces the numbers of all examples by those of this rank; False, with a message, if they do not fit."""
        assert self._state_name is not None
        given, kept = state_dict.get(name), self.get_buffer(self._state_name)
        if isinstance(given, Tensor):
            if given.shape != (self._examples.state.size,):
                errors.append(f"{_NAME}: {name} must be [{self._examples.state.size}], got {describe(given)}")
                return False
            mine = kept.clone()
            self._examples.take(mine, given)
            state_dict[name] = mine
        return True

    def _check_index(self, index: Tensor | None, lead: torch.Size) -> Tensor:
        return self._check_numbers(index, lead, self._examples.state.size)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """What the `state_dict()` of a head that is not sharded would hold, whole, on every rank. All must call it.

        It takes [C, d] on each rank: for tables that one process can hold.
        """
        classes = [
            Layout(self.num_classes, self.exchange.world, rank, self.layout.order).classes()
            for rank in range(self.exchange.world)
        ]
        found: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            if name in ("slot_step", "sampler_lag", "sampler_unseen"):
                continue
            spread = getattr(self.sampler, "collective", False) and not getattr(self.sampler, "whole_state", False)
            if spread and name.startswith("sampler."):
                continue  # a plain head keeps its sampler, and rebuilds it if it depends on the table
            if isinstance(value, DTensor):
                by_slot = value = value.full_tensor()
                if name != self._state_name:
                    value = torch.empty_like(by_slot)
                    value[torch.cat(classes).to(value.device)] = by_slot
            found[name] = value
        return found
