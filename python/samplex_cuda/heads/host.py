"""Class tables that do not fit on the device of the encoder: rows in memory of the host, or in a mapped file.

A training step draws, gathers the distinct rows that it needs, and sends them to the device of `h`. The loss of such a
small table runs there as always; its row gradients come back and update the rows where they are. So what crosses is
the touched rows, their gradients and ids, once each, whatever C is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from samplex_cuda._checks import FLOATS, check_choice, describe
from samplex_cuda.draw import Draw, Negatives
from samplex_cuda.functional._inputs import known_positives, target_weights
from samplex_cuda.ops.fused_loss import run_loss
from samplex_cuda.ops.loss_types import Form, Inputs, LossGrad, Table, acc_dtype
from samplex_cuda.ops.row_gradients import RowGradients, row_gradients
from samplex_cuda.ops.sphere import project_rows_
from samplex_cuda.tables import empty_table, mapped_table, set_table_file, table_file

if TYPE_CHECKING:
    from samplex_cuda.heads.classifier import LossSpec, SampledClassifier

__all__ = ["HostTable", "beside_table", "host_loss", "keep_on_host", "make_host_table"]

_NAME = "SampledClassifier"
_NO_TARGET = -100
_Method = TypeVar("_Method", bound=Callable[..., Any])
_task_id = torch._C._current_graph_task_id
_MOST_BACKWARDS = 16  # whose gradients may wait, those of backwards that never come to the table


class HostTable(NamedTuple):
    """Where the table of a head is that does not follow `.to(device)`.

    Example:
        >>> import samplex_cuda as sx
        >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=10)
        >>> head.host_table()
        >>> head.host.compute, head.host.file
        ('device', None)
    """

    compute: str  # where losses are computed: "device", that of h, or "host"
    file: Path | None  # that the rows are mapped from


def crosses(h: Tensor, table: Tensor) -> bool:
    """Whether h is on another device than the table; tests replace it."""
    return h.device != table.device


def to_side(value: Any, device: torch.device) -> Any:
    """Tensors of a call, alone or in tuples, on `device`; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Negatives):
        return Negatives(to_side(value.ids, device), to_side(value.log_q, device))
    if isinstance(value, Draw):
        return Draw(to_side(value.ids, device), to_side(value.log_q, device), value.independent)
    if type(value) is tuple:
        return tuple(to_side(part, device) for part in value)
    return value


def beside_table(method: _Method) -> _Method:
    """A method of a head whose table is on the host answers there, and gives the answer to the device of `h`."""

    @functools.wraps(method)
    def run(self: Any, h: Tensor, *args: Any, **options: Any) -> Any:
        if self.host is None or not isinstance(h, Tensor) or not crosses(h, self.weight):
            return method(self, h, *args, **options)
        here = self.weight.device
        args, moved = to_side(args, here), {name: to_side(value, here) for name, value in options.items()}
        return to_side(method(self, to_side(h, here), *args, **moved), h.device)

    return cast(_Method, run)


# ------------------------------------------------------------------------------------------------ making
@torch.no_grad()
def make_host_table(head: SampledClassifier, file: str | Path | None, compute: str) -> HostTable:
    """Puts the table of a head into memory of the host, or into a new file; see `SampledClassifier.host_table`."""
    where = f"{_NAME}.host_table"
    check_choice(where, "compute", compute, ("device", "host"))
    own = dict(head.named_parameters(recurse=False))
    if head.host is not None:
        raise ValueError(f"{where}: head must not be on the host already, got one with {head.host}")
    if "weight" not in own or head._replica is not None or hasattr(head, "layout"):
        raise ValueError(f"{where}: head must have a separate table, got one that is shared, sharded or computed")
    if head.fused is not None:
        raise ValueError(f"{where}: head must not be fused yet, got a fused optimizer; make optimizers afterwards")
    for name, p in own.items():
        if p.grad is not None:
            raise ValueError(f"{where}: gradients must be None, got one of {name}; call zero_grad() first")
    if file is not None and not isinstance(file, str | Path):
        raise TypeError(f"{where}: file must be a path or None, got {describe(file)}")
    weight, empty = head.weight, head.weight.is_meta
    others = [name for name, t in (*head.named_parameters(), *head.named_buffers()) if t.is_meta]
    if set(others) - {"weight", "bias"}:
        raise ValueError(
            f"{where}: only weight and bias may be on the meta device, got {', '.join(others)}; create the "
            'sampler outside of torch.device("meta")'
        )
    rows, width = weight.shape
    if file is not None:
        table = mapped_table(file, rows, width, dtype=weight.dtype)
    elif weight.is_cpu:
        table = weight.data
    else:
        table = empty_table(rows, width, device="cpu", dtype=weight.dtype)
    if empty:
        head.weight = nn.Parameter(table)
        if head.bias is not None:
            head.bias = nn.Parameter(torch.empty(rows, dtype=weight.dtype))
    else:
        if table is not weight.data:
            table.copy_(weight)
        weight.data = table
        torch._C._increment_version([weight])
    head.cpu()
    if empty:
        head.reset_parameters()
    path = None if file is None else Path(file)
    if path is not None:
        set_table_file(head.weight, path)
    return HostTable(compute, path)


def keep_on_host(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What a module applies to its tensors (`.to`, `.cuda`, `.half`) without the change of the device."""

    def kept(t: Tensor) -> Tensor:
        dtype = fn(torch.empty(0, dtype=t.dtype, device=t.device)).dtype
        if dtype is t.dtype:
            return t
        file = table_file(t)
        if file is not None:
            raise TypeError(f"{_NAME}: weight must stay {t.dtype}, that of its file {file}, got {dtype}")
        return t.to(dtype)

    return kept


# ------------------------------------------------------------------------------------------------ the rows
class _Crossing:
    """The sink of a loss over gathered rows: it keeps their gradients until autograd comes to the table."""

    at_once = False

    def __init__(self) -> None:
        self.found: dict[int, RowGradients] = {}

    def deliver(self, grad: LossGrad, need: tuple[bool, bool, bool]) -> tuple[Tensor | None, None, None]:
        """See `Sink.deliver`."""
        need_hidden, need_weight, need_bias = need
        rows = row_gradients(grad, need_weight or need_bias, need_bias)
        if grad.plan.normalize and need_weight:
            assert grad.weight is not None
            project_rows_(rows.row_grads, rows.row_ids, grad.weight)
        if need_weight or need_bias:
            for task in list(self.found)[: 1 - _MOST_BACKWARDS]:
                self.found.pop(task, None)
            self.found[_task_id()] = rows
        return (rows.d_hidden if need_hidden else None), None, None


class _Gather(torch.autograd.Function):
    """Rows `touched` of a table on the host, on another device; their gradients go to the sink of the table."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        touched: Tensor,
        device: torch.device,
        sink: Any,
        crossing: _Crossing,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.crossing, ctx.touched = sink, crossing, touched
        ctx.table = Table(
            (weight.shape[0], weight.shape[1]), weight.dtype, None if bias is None else bias.dtype, weight._version
        )
        ctx.host = weight.device
        return _sent(weight.detach(), touched, device), None if bias is None else _sent(bias.detach(), touched, device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{_NAME}: double backward (create_graph=True) is not supported")
        rows = ctx.crossing.found.pop(_task_id(), None)
        if rows is None:
            return (None,) * 6
        n = int(rows.number.item())  # the host goes on with these rows: it waits for them anyway
        ids = ctx.touched[to_side(rows.row_ids[:n], ctx.host)]
        grads, of_bias = to_side(rows.row_grads[:n], ctx.host), to_side(rows.row_bias[:n], ctx.host)
        made = ctx.sink.deliver_rows(ids, grads, of_bias, ctx.table, ctx.needs_input_grad[:2])
        return (*made, None, None, None, None)


def _sent(table: Tensor, ids: Tensor, device: torch.device) -> Tensor:
    """Rows of a table on another device; to a GPU through pinned memory, so that the host does not wait."""
    if device.type != "cuda":
        return to_side(table.index_select(0, ids), device)
    staged = torch.empty((ids.shape[0], *table.shape[1:]), dtype=table.dtype, pin_memory=True)
    return torch.index_select(table, 0, ids, out=staged).to(device, non_blocking=True)


# ------------------------------------------------------------------------------------------------ the loss
def host_loss(head: SampledClassifier, h: Tensor, y: Tensor, given: dict[str, Any]) -> Tensor:
    """`head(h, y, **given)` for an h on another device than the table."""
    spec, here = head.spec(), head.weight.device
    assert head.host is not None
    if not head.training or head.host.compute == "host" or not spec.needs.draws:
        moved = {name: to_side(value, here) for name, value in given.items()}
        loss: Tensor = head.forward(to_side(h, here), to_side(y, here), **moved)
        return to_side(loss, h.device)
    rows, target, lead = head._check_batch(h, y, given["features"], given["sample_weight"], given["positives"])
    device = h.device
    given = {name: to_side(value, here) for name, value in given.items()}
    target, y = to_side(target, here), to_side(y, here)
    if head.live is not None:
        target = head._refuse_retired(target)
    shares = None
    if given["target_weight"] is not None:
        if not spec.loss.takes_target_weight:
            raise ValueError(f"{_NAME}: target_weight must be None with {spec.loss!r}, got a tensor")
        shares = target_weights(_NAME, given["target_weight"], y, target, head.weight)
    own = None if given["negatives"] is None else head._own_negatives(spec, given["negatives"], target, lead)
    index = head._check_index(given["index"], lead) if spec.needs.example_index else None
    mined = None if given["hard"] is None else head._hard_negatives(spec, given["hard"], target, lead)
    weight = given["sample_weight"]
    form = spec.form if weight is None and mined is None else spec.rows
    head._refuse_targets(target)
    if rows.dtype is not head.weight.dtype:
        if not (rows.dtype in FLOATS and torch.is_autocast_enabled(device.type)):
            raise TypeError(
                f"{_NAME}: h must be {head.weight.dtype} like weight (or run under autocast), got {describe(h)}"
            )
        rows = rows.to(head.weight.dtype)
    known = None
    if given["positives"] is not None:
        known = known_positives(spec.loss.name, given["positives"], rows.shape[0], here)
    loss = _sampled(head, spec, form, rows, target, given, index, known, own, shares)
    if mined is not None:
        from samplex_cuda.heads.hard import join_losses

        loss = join_losses(loss, _sampled(head, spec, form, rows, target, given, index, known, mined, shares))
    if weight is not None or mined is not None:
        return to_side(head._reduced(to_side(loss, here), target, weight, lead, shares is not None), device)
    return loss if form.reduction or len(lead) == 1 else loss.reshape(lead)


def _sampled(
    head: SampledClassifier,
    spec: LossSpec,
    form: Form,
    h: Tensor,
    target: Tensor,
    given: dict[str, Any],
    index: Tensor | None,
    known: tuple[Tensor, Tensor] | None,
    own: Draw | None,
    shares: Tensor | None,
) -> Tensor:
    """The loss of h on its device, with draws on the sampler's; everything else that comes in is on the host."""
    device, here = h.device, head.weight.device
    sampler, follower = head.sampler, head.follower
    side = next((t.device for t in (*sampler.buffers(), *sampler.parameters())), here)
    with torch.no_grad():
        if follower.active:
            head._follow(head.weight, head.bias, h.shape[0])
        draw, target_log_q = own, None
        if draw is None:
            features, context, key = (to_side(given[name], side) for name in ("features", "context", "key"))
            draw, target_log_q = head._draw(
                spec, to_side(h.detach(), side), to_side(target, side), features, context, key
            )
    ids = to_side(draw.ids, here)
    valid = head._valid(target)
    flat = torch.cat([target[valid], ids.reshape(-1)])
    if flat.numel():
        low, high = (int(bound) for bound in flat.aminmax())
        if low < 0 or high >= head.num_classes:
            raise IndexError(f"{_NAME}: negatives must be in [0, {head.num_classes}), got {low if low < 0 else high}")
    touched, place = torch.unique(flat, return_inverse=True)
    if touched.numel() == 0:  # neither a target nor a draw: any row
        touched = ids.new_zeros(1)
    local_target = torch.full_like(target, _NO_TARGET)
    split = flat.numel() - ids.numel()
    local_target[valid] = place[:split]
    offsets, known_ids = _known_among(touched, known)
    state = used = None
    if index is not None and head._state_name is not None:
        state = head.get_buffer(head._state_name)
        used = state[index]
    crossing = _Crossing()
    sink = head.fused or head._rows_of(head.weight, head.bias)
    rows, biases = _Gather.apply(head.weight, head.bias, touched, device, sink, crossing)
    x = Inputs(
        head._query(h).contiguous(),
        rows,
        biases,
        to_side(local_target, device),
        to_side(place[split:].view(ids.shape).contiguous(), device),
        to_side(draw.log_q.to(acc_dtype(h.dtype)), device),
        None if head.class_weight is None else to_side(head.class_weight[touched], device),
        to_side(offsets, device),
        to_side(known_ids, device),
        to_side(target_log_q, device),
        to_side(used, device),
        target_weight=to_side(shares, device),
    )
    loss, extra = run_loss(spec.loss, x, form._replace(ignore_index=_NO_TARGET), crossing)
    if follower.active:
        follower.touch(torch.where(valid, target, -1).reshape(-1), ids.reshape(-1))
    if state is not None and index is not None and used is not None and extra is not None:
        spec.loss.update_state(state, index, used, to_side(extra.detach(), here))
    return loss


def _known_among(touched: Tensor, known: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """Known positives, CSR, as places among the gathered rows; one that was not drawn cannot be a negative."""
    if known is None:
        return None, None
    offsets, ids = known
    place = torch.searchsorted(touched, ids).clamp_(max=touched.numel() - 1)
    among = touched[place] == ids
    before = torch.cat([offsets.new_zeros(1), among.cumsum(0)])
    return before[offsets], place[among]
