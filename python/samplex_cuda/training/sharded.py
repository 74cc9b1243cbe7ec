"""A run on the ranks of `torch.distributed`: each has a part of the class table and of every batch (docs/scale.md)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from samplex_cuda import distributed
from samplex_cuda.data import Dataset
from samplex_cuda.distributed import Heartbeat, agree, attempt_store
from samplex_cuda.distributed.checkpoint import read_manifest
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.rng import Key
from samplex_cuda.training import checkpoint, models
from samplex_cuda.training.checkpoint import CheckpointError
from samplex_cuda.training.config import Config
from samplex_cuda.training.ranks import Alone, RanksError, launched
from samplex_cuda.training.run_folder import RunError
from samplex_cuda.training.state import UNFIT, check_meta, is_sharded
from samplex_cuda.training.storing import Whole, unfit

if TYPE_CHECKING:
    from samplex_cuda.training.trainer import Trainer

__all__ = ["Ranks", "Shards", "join_ranks"]

T = TypeVar("T")
_ROWS = 0x5B0_0000_0000_0000  # the key of the first class rows meets no other one under the same seed
_MOST_SPREAD = 1 << 31


class _Encode(nn.Module):
    """`encode` as a forward, for DistributedDataParallel, which sees no other method."""

    def __init__(self, encoder: models.Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return self.encoder.encode(batch)


class Ranks(Alone):
    """The ranks of a process group, each with a part of the class table and of every batch.

    Args:
        config: of the run.
        group: its ranks.
        own: whether the group was made for this run, and ends with it.

    Example:
        >>> from samplex_cuda.training.ranks import join
        >>> ranks = join(config)  # under torchrun, with training.shard = "classes"  # doctest: +SKIP
    """

    sharded = True

    def __init__(self, config: Config, group: Any, own: bool) -> None:
        self.group, self._own = group, own
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.timeout, self.kind = config.training.rank_timeout, config.training.shard_encoder
        self._wrapped: nn.Module | None = None
        self._beat: Heartbeat | None = None
        self._stopped: Callable[[], bool] | None = None

    # ------------------------------------------------------------------------------------------ deciding together
    def lead(self, work: Callable[[], T]) -> T:
        """See `Alone.lead`."""
        told: list[Any] = [None, None]
        raised: BaseException | None = None
        if self.leads:
            try:
                told = [work(), None]
            except Exception as error:
                told, raised = [None, str(error) or repr(error)], error
        dist.broadcast_object_list(told, group=self.group, group_src=0)
        if raised is not None:
            raise raised
        if told[1] is not None:
            raise RanksError(told[1])
        result: T = told[0]
        return result

    def in_turn(self, work: Callable[[], T]) -> T:
        """See `Alone.in_turn`."""
        made: list[T] = []
        self.lead(lambda: made.append(work()))
        return made[0] if self.leads else work()

    def agree(self, what: dict[str, Any]) -> None:
        """See `Alone.agree`."""
        try:
            agree(what, self.group)
        except ValueError as error:
            raise RanksError(str(error)) from None

    def part(self, rows: Tensor) -> Tensor:
        """See `Alone.part`."""
        return rows.tensor_split(self.world)[self.rank]

    def batch(self, dataset: Dataset, rows: Tensor) -> dict[str, Tensor]:
        """See `Alone.batch`: rows of several targets are as wide as the widest of all ranks."""
        made = dataset.batch(rows)
        if dataset.multi_label:
            y = made["y"]
            made["y"] = nn.functional.pad(y, (0, self.most(y.shape[1]) - y.shape[1]), value=-100)
        return made

    def most(self, number: int) -> int:
        """See `Alone.most`."""
        told = torch.tensor([number])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        return int(told)

    def sums(self, numbers: list[int]) -> list[int]:
        """See `Alone.sums`."""
        told = torch.tensor(numbers)
        dist.all_reduce(told, group=self.group)
        return [int(n) for n in told]

    def gather(self, value: T) -> list[T]:
        """See `Alone.gather`."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return found

    # ------------------------------------------------------------------------------------------ life and death
    @contextlib.contextmanager
    def alive(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """See `Alone.alive`."""
        patience = min(30.0, self.timeout / 2)
        self._stopped = stopped
        with Heartbeat(rank=self.rank, world=self.world, interval=patience / 6, patience=patience) as self._beat:
            try:
                yield
            finally:
                self._beat, self._stopped = None, None

    def watch(self, what: str) -> contextlib.AbstractContextManager[None]:
        """See `Alone.watch`."""
        return contextlib.nullcontext() if self._beat is None else self._beat.watch(what, stop=self._stopped)

    def doing(self, what: str) -> None:
        """See `Alone.doing`."""
        if self._beat is not None:
            self._beat.doing(what)

    def store(self, trainer: Trainer) -> Whole:
        """See `Alone.store`."""
        return Shards(trainer, self)

    def close(self) -> None:
        """See `Alone.close`."""
        if self._own and dist.is_initialized():
            dist.destroy_process_group()

    # ------------------------------------------------------------------------------------------ the model
    def seed(self, seed: int, step: int) -> None:
        """See `Alone.seed`: a function of seed, step and rank, so that any number of ranks can go on."""
        torch.manual_seed((seed * 1_000_003 + step) * 65_537 + self.rank + 1)

    def build(
        self, config: Config, train: Dataset, batch_size: int, fit: bool, trust_model: str | None
    ) -> tuple[models.Encoder, SampledClassifier]:
        """See `Alone.build`: the head never exists as a whole."""
        device = torch.device(config.training.device)
        if batch_size < self.world:
            raise RanksError(
                f"config: [training] batch_size, the total of all ranks, must be at least {self.world}, one row per "
                f"rank, got {batch_size}"
            )
        encoder, whole = models.build(config, train, fit=fit, trust_model=trust_model, head_device="meta")
        if fit:
            self._share(encoder, *models.parts_of(whole.sampler))
        width = int(getattr(train, "window", 1)) if train.kind == "text" else 1
        head = whole.shard(
            self.group,
            encoder="average",
            order="spread" if whole.num_classes <= _MOST_SPREAD else "class",
            batch_capacity=-(-batch_size // self.world) * width,
            key=Key(config.training.seed ^ _ROWS),
            device=device,
        )
        self._wrapped = None
        # Row gradients are no business of DistributedDataParallel and FSDP2: `join_rows` has them.
        tables = encoder.tables()
        apart = {id(p) for p in tables}
        if any(p.requires_grad and id(p) not in apart for p in encoder.parameters()):
            if self.kind == "ddp":
                module = _Encode(encoder)
                names = [name for name, p in module.named_parameters() if id(p) in apart]
                ddp = nn.parallel.DistributedDataParallel
                ddp._set_params_and_buffers_to_ignore_for_model(module, names)
                self._wrapped = ddp(module, process_group=self.group)
            else:
                from torch.distributed.device_mesh import DeviceMesh
                from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

                plain = type(encoder).encode is models.Encoder.encode
                mesh = DeviceMesh.from_group(self.group, device.type)
                fully_shard(encoder, mesh=mesh, ignored_params=set(tables))
                if not plain:  # it may run layers without calling the encoder itself
                    register_fsdp_forward_method(encoder, "encode")
        return encoder, head

    def _share(self, *modules: nn.Module | None) -> None:
        """What the first rank has fitted, for all: fits may differ in their last bits between machines."""
        for module in modules:
            if module is not None:
                state = self.lead(partial(_on_host, module))
                if not self.leads:
                    module.load_state_dict(state)

    def refit(self, config: Config, train: Dataset, encoder: models.Encoder, head: SampledClassifier) -> None:
        """See `Alone.refit`."""
        models.refit_tree(config, train, encoder, head)
        self._share(*models.parts_of(head.sampler), encoder.tree_map)

    def encode(self, encoder: models.Encoder, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """See `Alone.encode`."""
        if self._wrapped is None:
            return encoder.encode(batch)
        h, features = self._wrapped(batch)
        return h, features

    def row_losses(self, head: SampledClassifier, h: Tensor, y: Tensor, features: Tensor | None) -> Tensor:
        """See `Alone.row_losses`."""
        sharded: Any = head
        ids = y.unsqueeze(1) if y.dim() == 1 else y
        log_p = sharded.log_prob(h, ids, features=features)
        valid = ids >= 0
        return -torch.where(valid, log_p, 0.0).sum(1) / valid.sum(1).clamp(min=1)

    def best_without(
        self, head: SampledClassifier, h: Tensor, features: Tensor | None, k: int, offsets: Tensor, known: Tensor
    ) -> Tensor:
        """See `Alone.best_without`: the best of all classes, some more of them, without the known ones."""
        table, most = self._padded(len(h), offsets, known)
        ids = head.topk(h, min(k + most, head.num_classes), features=features)[1]
        ids = ids.masked_fill((ids.unsqueeze(2) == table.to(ids.device).unsqueeze(1)).any(2), -1)
        order = (ids < 0).to(torch.int8).argsort(dim=1, stable=True)
        found = ids.gather(1, order)[:, :k]
        return nn.functional.pad(found, (0, k - found.shape[1]), value=-1)

    def log_q(self, head: SampledClassifier, seen: Tensor, ids: Tensor, context: Tensor | None) -> Tensor:
        """See `Alone.log_q`: a sampler that is spread over the ranks must be asked by all of them for the same rows."""
        if not getattr(head.sampler, "collective", False):
            return super().log_q(head, seen, ids, context)
        parts: list[Any] = self.gather((seen.cpu(), ids.cpu(), None if context is None else context.cpu()))
        rows, wanted = (torch.cat([part[i] for part in parts]).to(seen.device) for i in (0, 1))
        given = None if context is None else torch.cat([part[2] for part in parts]).to(seen.device)
        first = sum(len(part[0]) for part in parts[: self.rank])
        return super().log_q(head, rows, wanted, given)[first : first + len(seen)]

    def _padded(self, rows: int, offsets: Tensor, known: Tensor) -> tuple[Tensor, int]:
        """CSR lists as a table [n, most] with -1 behind each list, and `most`, the longest of all ranks."""
        lengths = offsets.diff()
        most = self.most(int(lengths.max()) if len(lengths) else 0)
        table = torch.full((rows, most), -1)
        place = torch.arange(len(known)) - offsets[:-1].repeat_interleave(lengths)
        table[torch.arange(rows).repeat_interleave(lengths), place] = known
        return table, most

    def first_ranks(
        self,
        head: SampledClassifier,
        h: Tensor,
        y: Tensor,
        features: Tensor | None,
        known: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """See `Alone.first_ranks`."""
        sharded: Any = head
        targets = y.unsqueeze(1) if y.dim() == 1 else y
        without = None if known is None else self._padded(len(h), *known)[0].to(h.device)
        return sharded.first_ranks(h, targets, features=features, known=without)

    def part_weights(self, encoder: models.Encoder) -> None:
        """See `Alone.part_weights`: after a forward without a backward FSDP2 keeps all of them."""
        whole: Any = encoder
        if hasattr(whole, "reshard"):
            whole.reshard()

    def join_rows(self, tables: list[nn.Parameter]) -> None:
        """See `Alone.join_rows`: the mean over the ranks, as DistributedDataParallel would make it."""
        for table in tables:
            grad, width = table.grad, table.shape[1:]
            ids = torch.empty(0, dtype=torch.int64, device=table.device)
            rows = torch.empty(0, *width, dtype=table.dtype, device=table.device)
            if grad is not None:
                grad = grad.coalesce()
                ids, rows = grad.indices()[0], grad.values()
            counts = self.gather(len(ids))
            if not max(counts):
                continue
            more = max(counts) - len(ids)
            ids, rows = nn.functional.pad(ids, (0, more)), torch.cat([rows, rows.new_zeros(more, *width)])
            all_ids, all_rows = ids.new_empty(self.world * len(ids)), rows.new_empty(self.world * len(rows), *width)
            dist.all_gather_single(all_ids, ids.contiguous(), group=self.group)
            dist.all_gather_single(all_rows, rows.contiguous(), group=self.group)
            used = torch.cat([torch.arange(n) + rank * max(counts) for rank, n in enumerate(counts)]).to(ids.device)
            mean = all_rows[used] / self.world
            table.grad = torch.sparse_coo_tensor(all_ids[used].unsqueeze(0), mean, table.shape).coalesce()

    def clip(self, parameters: list[nn.Parameter], norm: float, head: Sequence[nn.Parameter] = ()) -> float:
        """See `Alone.clip`; the squares of the rows of all ranks are summed."""
        spread = [p.grad for p in parameters if isinstance(p.grad, DTensor)]
        if not spread and not head:
            return super().clip(parameters, norm)
        rest = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
        of_head = [p.grad for p in head if p.grad is not None]
        numbers = []
        if spread:
            found: Any = nn.utils.get_total_norm(spread)
            numbers.append((found.full_tensor() if isinstance(found, DTensor) else found).double())
        numbers += [_norm(g) for g in rest]
        if head:
            device = head[0].device
            squares = torch.stack([_norm(g) ** 2 for g in of_head] or [torch.zeros((), device=device)]).sum().double()
            dist.all_reduce(squares, group=self.group)
            numbers.append(squares.sqrt())
        total = torch.stack(numbers).norm()
        factor = float((norm / (total + 1e-6)).clamp(max=1.0))
        for g in [*spread, *rest, *of_head]:
            g.mul_(factor)
        return float(total)


def _norm(grad: Tensor) -> Tensor:
    return (grad.coalesce().values() if grad.is_sparse else grad).norm().double()


class Shards(Whole):
    """Checkpoints of ranks, through `torch.distributed.checkpoint`; every rank must call each method."""

    ranks: Ranks

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        super().__init__(trainer)
        self.ranks = ranks

    def _modules(self) -> dict[str, nn.Module]:
        return {"encoder": self.trainer.encoder, "head": self.trainer.head}

    def _averages(self) -> dict[str, Tensor]:
        head: Any = self.trainer.head
        return {
            f"average.{name}": head.as_dtensor(value) if name.startswith("head.") else value
            for name, value in self.trainer.average.items()
        }

    def save(self, path: Path) -> None:
        """See `Whole.save`."""
        trainer = self.trainer
        parts = self.ranks.gather({name: value.cpu() for name, value in trainer.encoder.carried().items()})
        # [layers, columns, width]: the columns of the ranks side by side.
        carried = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
        meta = self.meta() | {
            "optimizers": {},
            "averaged": sorted(trainer.average),
            "carried": {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in carried.items()},
        }
        tensors = self._averages() | {f"carried.{name}": value for name, value in carried.items()}
        self._write(path, trainer.optimizers, tensors, meta, trainer.config.training.keep)

    def save_best(self, path: Path) -> None:
        """See `Whole.save_best`."""
        self._write(path, {}, {}, self.meta("best"), 1)

    def _write(
        self, path: Path, optimizers: dict[str, Any], tensors: dict[str, Tensor], meta: dict[str, Any], keep: int
    ) -> None:
        try:
            distributed.save_checkpoint(
                path, self._modules(), optimizers, tensors=tensors, extra=meta, group=self.ranks.group
            )
        except distributed.CheckpointError as error:
            raise CheckpointError(
                f"checkpoint: {path}: could not be saved: {error}. Earlier checkpoints are untouched."
            ) from error
        self.ranks.lead(lambda: checkpoint.prune(path.parent, keep, newest=path.name))

    def restore(self, path: Path) -> str:
        """See `Whole.restore`; a checkpoint of one process can be taken over, too."""
        if not is_sharded(path):
            return super().restore(path)
        t = self.trainer
        meta = read_manifest(path)["extra"]
        changed = check_meta(path, meta, t.config, t.train, t.device)
        t.make(fit=False)
        settings = {name: [_settings(g) for g in o.param_groups] for name, o in t.optimizers.items()}
        try:
            t.average = self._room(meta["averaged"])
            carried = {
                name: torch.empty(shape, dtype=getattr(torch, dtype))
                for name, (shape, dtype) in meta["carried"].items()
            }
            tensors = self._averages() | {f"carried.{name}": value for name, value in carried.items()}
            distributed.load_checkpoint(path, self._modules(), t.optimizers, tensors=tensors, group=self.ranks.group)
            for name, optimizer in t.optimizers.items():
                for group, kept in zip(optimizer.param_groups, settings[name], strict=True):
                    group.update(kept)
            self._carry(carried)
            self._begin(meta)
        except UNFIT as error:
            raise unfit(t.run_dir, path, error) from None
        return changed

    def _room(self, names: list[str]) -> dict[str, Tensor]:
        """Tensors of the sizes of the averages that were saved and are still asked for."""
        wanted = self.trainer.averages() if self.trainer.config.training.average != "none" else {}
        return {
            name: torch.empty_like(p, dtype=torch.promote_types(p.dtype, torch.float32)).detach()
            for name, p in wanted.items()
            if name in names
        }

    def _carry(self, carried: dict[str, Tensor]) -> None:
        world, rank = self.ranks.world, self.ranks.rank
        mine = {n: v.tensor_split(world, 1)[rank].contiguous().to(self.trainer.device) for n, v in carried.items()}
        self.trainer.encoder.carry(mine)

    def _take(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Whole tensors of a checkpoint of one process: each rank takes its part of them."""
        t, head = self.trainer, self.trainer.head
        rows: Any = head
        classes = rows.layout.classes()
        owned = {id(p) for p in head.parameters()}
        for name, parameter in t.encoder.named_parameters():
            tensors[f"encoder.{name}"] = _like(parameter, tensors[f"encoder.{name}"])
        for which, optimizer in t.optimizers.items():
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for name in [n for n in tensors if n.startswith(f"optimizer.{which}.")]:
                parameter = parameters[int(name.split(".")[2])]
                value = tensors[name]
                if id(parameter) in owned and value.shape[:1] == (head.num_classes,):
                    tensors[name] = value[classes]
                elif value.shape == parameter.shape:
                    tensors[name] = _like(parameter, value)
        wanted = t.averages() if t.config.training.average != "none" else {}
        for name, parameter in wanted.items():
            if (mean := tensors.get(f"average.{name}")) is not None:
                tensors[f"average.{name}"] = mean[classes] if id(parameter) in owned else _like(parameter, mean)
        super()._take(tensors, meta)
        self._carry({n.removeprefix("carried."): v for n, v in tensors.items() if n.startswith("carried.")})


def _on_host(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.cpu() for name, t in module.state_dict().items()}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """A whole tensor as its parameter is kept."""
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _group() -> Any:
    return dist.group.WORLD


def join_ranks(config: Config) -> Ranks:
    """Makes or takes the process group of a sharded run; see `ranks.join`."""
    t = config.training
    device = torch.device(t.device)
    if device.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
        torch.cuda.set_device(index)  # "cuda" is this one from now on
    own = not dist.is_initialized()
    if own:
        rank, world = launched()
        patience = timedelta(seconds=t.rank_timeout)
        store: dist.Store = dist.HashStore()
        if "MASTER_ADDR" in os.environ:
            store = next(iter(dist.rendezvous("env://", rank, world, timeout=patience)))[0]
        # The store of torchrun's agent outlives the processes of an attempt.
        store = attempt_store(store, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    ranks = Ranks(config, _group(), own)
    try:
        flat = {f"{table}.{key}": value for table, keys in config.as_dict().items() for key, value in keys.items()}
        flat.pop("training.device")
        ranks.agree(flat)
    except RunError:
        ranks.close()
        raise
    return ranks
