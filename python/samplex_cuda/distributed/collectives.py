"""What the ranks of a sharded head send each other in a step: fixed sizes, all of it inside forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samplex_cuda import _device
from samplex_cuda.distributed.health import agree
from samplex_cuda.rng import Key, key_tensor

__all__ = ["ENCODERS", "Everyone", "Exchange", "backends_of", "check_backend", "group_of"]

_NAME = "SampledClassifier.shard"
_ALIGN = 16  # bytes; of each field
ENCODERS = ("average", "sum")  # what happens to the gradients of the model before the head


def group_of(mesh_or_group: Any, name: str = _NAME) -> dist.ProcessGroup:
    """The process group of a `DeviceMesh` of one dimension, of a group, or of None: the default group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{name}: torch.distributed must be initialized first: start with torchrun and call "
            "torch.distributed.init_process_group()"
        )
    if mesh_or_group is None:
        group = dist.group.WORLD
    elif isinstance(mesh_or_group, dist.device_mesh.DeviceMesh):
        if mesh_or_group.ndim != 1:
            names = mesh_or_group.mesh_dim_names
            raise ValueError(f"{name}: mesh must have one dimension, got {mesh_or_group.ndim} {names}: pass mesh[name]")
        group = mesh_or_group.get_group()
    elif isinstance(mesh_or_group, dist.ProcessGroup):
        group = mesh_or_group
    else:
        raise TypeError(f"{name}: mesh_or_group must be a DeviceMesh or a ProcessGroup, got {mesh_or_group!r}")
    if group is None or dist.get_rank(group) < 0:
        raise ValueError(f"{name}: this rank must be a member of the group, got rank {dist.get_rank()} outside of it")
    return group


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each type of device, e.g. {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def check_backend(name: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """ValueError unless the group can exchange tensors on `device` without copies through the host.

    Args:
        name: of the public function, for the message.
        group: the process group.
        device: of the class rows.
    """
    found = backends_of(group)
    mine = found.get(device.type)
    if mine is not None and (device.type, mine) != ("cuda", "gloo"):
        return
    wanted = {"cpu": "gloo", "cuda": "nccl"}.get(device.type, "a backend of that device")
    given = ",".join(f"{kind}:{backend}" for kind, backend in found.items())
    raise ValueError(
        f"{name}: group must have a backend for class rows on {device.type} ({wanted}), got {given}; make the group "
        'with torch.distributed.init_process_group("cpu:gloo,cuda:nccl") or new_group(backend=...), or move the head'
    )


class Everyone(NamedTuple):
    """The batches of all ranks as one, rows in the order of the ranks."""

    rows: int  # of this rank
    place: Tensor | None  # int64 [R], of each row in [world * capacity]; None: it is there already
    first: Tensor  # int64 [], the first of this rank's rows
    key: Tensor  # int64 [2], that of rank 0
    width: int = 0  # the widest of the ranks; on a GPU that of this rank
    batch: list[Tensor] | None = None  # the fields of all ranks, where they came with the header
    lost: Tensor | None = None  # bool [] on a GPU, whether a rank refused its batch; elsewhere all ranks raise


class Exchange:
    """The collectives of one head.

    Args:
        group: the process group.
        capacity: the most rows of a rank in a step; None: the most of the first step.
        name: of the public function, for messages.
        grows: whether a larger batch raises the capacity on all ranks, for heads that pass no `fields` to `meet`. On a
            GPU this needs one more collective, for which the host waits.
    """

    def __init__(
        self, group: dist.ProcessGroup, capacity: int | None = None, name: str = _NAME, grows: bool = False
    ) -> None:
        self.group, self.capacity, self.name, self.grows = group, capacity, name, grows
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent = 0  # bytes that this rank has sent
        self._last: list[tuple[torch.dtype, torch.Size]] | None = None  # fields of the last step that all agreed on
        self.unique = 1.0  # of the last step: the share of entries that name a class for the first time

    def key(self, op: str, key: Key | Tensor | None, device: torch.device) -> Tensor:
        """This rank's key for `meet` or `stack`, int64 [2]: with None only the first rank's generator moves.

        Args:
            op: name for error messages.
            key: of the caller; that of the first rank counts.
            device: of the group.
        """
        if key is None and self.rank:
            return torch.zeros(2, dtype=torch.int64, device=device)
        return key_tensor(op, key, device)

    def check_rows(self, name: str, rows: int) -> None:
        """ValueError for a batch above the capacity."""
        if self.capacity is not None and rows > self.capacity and not self.grows:
            raise ValueError(
                f"{name}: a batch must have at most batch_capacity = {self.capacity} rows, got {rows}; pass a larger "
                "batch_capacity"
            )

    def meet(
        self,
        rows: int,
        form: Sequence[int],
        key: Tensor,
        *,
        refused: bool = False,
        width: int = 0,
        fields: Sequence[Tensor] | None = None,
        pads: Sequence[float] = (),
        settings: Callable[[], dict[str, Any]] | None = None,
    ) -> Everyone:
        """Every rank says how many rows it brings and in which form.

        On a CPU the rows themselves travel in the same collective if the last step had such fields, too: all ranks know
        its size then. A rank that brings something else sends its header alone, in a buffer of that size.

        Args:
            rows: B of this rank.
            form: numbers that must be equal on all ranks; the first is the digest of `settings`.
            key: int64 [2] on the device of the group; that of rank 0 counts.
            refused: whether this rank cannot take part in the step. On a CPU all ranks then stop. On a GPU nobody
                looks: this rank must go through the step with 0 rows, and `Everyone.lost` is set on all ranks.
            width: columns of what each row brings besides; ranks may have different ones on a CPU.
            fields: [B, ...] each, as for `gather`, whose sizes but B follow from the form; None: they come later.
            pads: as for `gather`.
            settings: those that must be equal on all ranks, for the message.
        """
        capacity = self._settle(rows, key.device)
        if self._alone(key):
            if not refused:
                self.check_rows(_NAME, rows)
            return Everyone(rows, None, key.new_zeros(()), key, width)
        kinds = None if fields is None else [(t.dtype, t.shape[1:]) for t in fields]
        packs = kinds is not None and kinds == self._last and not refused
        mine = torch.tensor([int(refused), rows, width, int(packs), *form], device="cpu")
        header = torch.cat([key, mine.to(key.device, non_blocking=True)])
        if _device.host_waits(header):
            headers = self.stack(header)
            counts = headers[:, 3]
            unused = torch.arange(capacity, device=headers.device) >= counts[:, None]
            first, common = counts[: self.rank].sum(), headers[0, :2].clone()
            lost = (headers[:, 2] != 0).any() | (headers[:, 6:] != headers[:1, 6:]).any()
            used_first = unused.reshape(-1).to(torch.int8).argsort(stable=True)
            return Everyone(rows, used_first, first, common, width, lost=lost)
        found, room = header.unsqueeze(0), _aligned(header.nbytes)
        if self._last is None:
            headers = self.stack(header)
        else:
            starts, total = _places(self._last, capacity)
            buffer = torch.empty(room + total, dtype=torch.uint8)
            buffer[: header.nbytes] = header.view(torch.uint8)
            if packs and fields is not None:
                _fill(buffer[room:], fields, pads, starts, capacity)
            found = self.stack(buffer)
            headers = found[:, : header.nbytes].contiguous().view(torch.int64)
        counts = headers[:, 3]
        if self.grows:
            capacity = self.capacity = max(capacity, int(counts.max()))
        first, common = counts[: self.rank].sum(), headers[0, :2].clone()
        self._agree(headers[:, 2], headers[:, 6:], counts, settings)
        if refused:
            return Everyone(rows, None, first, common, width)
        place = None
        if bool((counts != capacity).any()):
            place = torch.cat([torch.arange(int(n)) + rank * capacity for rank, n in enumerate(counts)])
        made = Everyone(rows, place, first, common, int(headers[:, 4].max()))
        if fields is not None and bool(headers[:, 5].all()):
            made = made._replace(batch=self._split(found[:, room:], fields, made))
        self._last = kinds
        return made

    def _agree(
        self, refused: Tensor, forms: Tensor, counts: Tensor, settings: Callable[[], dict[str, Any]] | None
    ) -> None:
        """RuntimeError on every rank if one of them cannot take part or brings something else than the others."""
        assert self.capacity is not None
        if refused[self.rank]:
            return  # its own error is on the way
        if bool(refused.any()):
            raise RuntimeError(
                f"{self.name}: rank {int(refused.argmax())} of the group rejected its batch, so no rank can take this "
                "step; see the error message of that rank"
            )
        if bool((counts > self.capacity).any()):
            rank = int((counts > self.capacity).to(torch.int8).argmax())
            raise ValueError(
                f"{self.name}: a batch must have at most batch_capacity = {self.capacity} rows, got "
                f"{int(counts[rank])} on rank {rank}; pass a larger batch_capacity"
            )
        if settings is not None and bool((forms[:, 0] != forms[0, 0]).any()):
            agree(settings(), self.group, op=self.name)  # every rank has seen the same headers
        forms = forms[:, 1:]
        other = (forms != forms[0]).any(1)
        if bool(other.any()):
            rank = int(other.to(torch.int8).argmax())
            raise RuntimeError(
                f"{self.name}: all ranks must call the head in the same way (training or not, gradients or not, the "
                f"same arguments and number of targets), got {forms[0].tolist()} on rank 0 and "
                f"{forms[rank].tolist()} on rank {rank}"
            )

    def _settle(self, rows: int, device: torch.device) -> int:
        """The capacity; without one, the largest batch of the ranks in the first step becomes it."""
        if self.capacity is not None and not (self.grows and device.type != "cpu"):
            return self.capacity
        most = torch.tensor([rows], device=device)
        if self.world > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        self.capacity = max(1, self.capacity or 0, int(most))
        return self.capacity

    def _alone(self, t: Tensor) -> bool:
        """Whether nothing is to be exchanged: one rank, whose host may look at numbers, so that nothing is padded."""
        return self.world == 1 and not _device.host_waits(t)

    def gather(self, everyone: Everyone, fields: Sequence[Tensor], pads: Sequence[float]) -> list[Tensor]:
        """The rows of all ranks: [R, ...] each, R being all rows, or world * capacity where the host may not look.

        Args:
            everyone: from `meet`.
            fields: [B, ...] each.
            pads: what stands in rows that a rank does not use.
        """
        assert self.capacity is not None
        if self._alone(fields[0]):
            return list(fields)
        starts, total = _places([(t.dtype, t.shape[1:]) for t in fields], self.capacity)
        mine = torch.empty(total, dtype=torch.uint8, device=fields[0].device)
        _fill(mine, fields, pads, starts, self.capacity)
        return self._split(self.stack(mine), fields, everyone)

    def _split(self, found: Tensor, fields: Sequence[Tensor], everyone: Everyone) -> list[Tensor]:
        """The fields [R, ...] of all ranks from their bytes [world, n]."""
        assert self.capacity is not None
        starts, _ = _places([(t.dtype, t.shape[1:]) for t in fields], self.capacity)
        parts = [
            found[:, start : start + _row_bytes(t) * self.capacity].contiguous().view(t.dtype)
            .view(self.world * self.capacity, *t.shape[1:])
            for t, start in zip(fields, starts, strict=True)
        ]  # fmt: skip
        return parts if everyone.place is None else [t.index_select(0, everyone.place) for t in parts]

    def sum_(self, t: Tensor) -> Tensor:
        """The sum of `t` over the ranks, in place."""
        if self.world == 1:
            return t
        if self.world == 2 and t.is_cpu:  # as many bytes, in one round instead of two; a + b has one order only
            first, second = self.stack(t)
            return torch.add(first, second, out=t)
        dist.all_reduce(t, group=self.group)
        self.sent += 2 * (self.world - 1) * t.numel() * t.element_size() // self.world
        return t

    def stack(self, t: Tensor) -> Tensor:
        """[world, ...]: the tensors of all ranks."""
        if self.world == 1:
            return t.unsqueeze(0).clone()
        made = t.new_empty(self.world * t.numel())
        dist.all_gather_single(made, t.reshape(-1), group=self.group)
        self.sent += (self.world - 1) * t.numel() * t.element_size()
        return made.view(self.world, *t.shape)

    def from_owners(self, mine: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
        """Numbers that one rank each knows, on every rank, bit by bit; 0 where no rank has them. One collective.

        Args:
            mine: bool [...], which entries this rank knows.
            fields: tensors of that shape, of 4 or 8 bytes per number.
        """
        if self.world == 1:
            return tuple(torch.where(mine, t, 0) for t in fields)
        parts = [torch.where(mine, t, 0).reshape(-1).view(torch.int32) for t in fields]
        found = self.sum_(torch.cat(parts)).split([part.numel() for part in parts])
        return tuple(part.view(t.dtype).view(t.shape) for part, t in zip(found, fields, strict=True))

    def swap(self, t: Tensor, counts: tuple[list[int], list[int]] | None) -> Tensor:
        """Rows of `t` [n, ...], in the order of the ranks they go to -> what this rank gets, in the order of the ranks.

        Args:
            t: what to send.
            counts: rows to each rank, and from each; None: the same number for all.
        """
        item = _row_bytes(t)
        if counts is None:
            made = torch.empty_like(t)
            dist.all_to_all_single(made, t.contiguous(), group=self.group)
            self.sent += (self.world - 1) * (t.shape[0] // self.world) * item
            return made
        made = t.new_empty(sum(counts[1]), *t.shape[1:])
        dist.all_to_all_single(made, t.contiguous(), counts[1], counts[0], group=self.group)
        self.sent += (t.shape[0] - counts[0][self.rank]) * item
        return made

    def to_home(self, rows: Tensor, place: Tensor | None, count: int) -> Tensor:
        """Parts [R, ...] for the rows of everyone -> the parts [world, count, ...] for the rows of this rank."""
        assert self.capacity is not None
        if self._alone(rows):
            return rows.unsqueeze(0)
        if place is not None:
            padded = rows.new_zeros(self.world * self.capacity, *rows.shape[1:])
            rows = padded.index_copy_(0, place, rows)
        parts = torch.empty_like(rows)
        dist.all_to_all_single(parts, rows.contiguous(), group=self.group)
        self.sent += (self.world - 1) * self.capacity * _row_bytes(rows)
        return parts.view(self.world, self.capacity, *rows.shape[1:])[:, :count]

    def send_home(self, rows: Tensor, place: Tensor | None, count: int) -> Tensor:
        """Partial sums [R, d] for the rows of everyone -> sums [count, d] for the rows of this rank, in rank order."""
        parts = self.to_home(rows, place, count)
        total = parts[0].clone() if self.world > 1 else parts[0]
        for part in parts[1:]:
            total += part
        return total

    def own(self, rows: Tensor, place: Tensor | None, count: int) -> Tensor:
        """This rank's rows among those of everyone."""
        assert self.capacity is not None
        if self._alone(rows):
            return rows
        if place is not None:
            padded = rows.new_empty(self.world * self.capacity, *rows.shape[1:])
            rows = padded.index_copy_(0, place, rows)
        return rows[self.rank * self.capacity : self.rank * self.capacity + count]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _places(kinds: Sequence[tuple[torch.dtype, torch.Size]], capacity: int) -> tuple[list[int], int]:
    """Where fields of these dtypes and row shapes begin in a buffer for `capacity` rows, and its bytes."""
    starts, total = [], 0
    for dtype, shape in kinds:
        starts.append(total)
        total += _aligned(shape.numel() * dtype.itemsize * capacity)
    return starts, total


def _fill(
    buffer: Tensor, fields: Sequence[Tensor], pads: Sequence[float], starts: Sequence[int], capacity: int
) -> None:
    for t, pad, start in zip(fields, pads, starts, strict=True):
        room = buffer[start : start + _row_bytes(t) * capacity].view(t.dtype).view(capacity, *t.shape[1:])
        room[: t.shape[0]] = t
        room[t.shape[0] :] = pad


def _row_bytes(t: Tensor) -> int:
    numbers = 1
    for size in t.shape[1:]:
        numbers *= size
    return numbers * t.element_size()
