"""Checkpoints of sharded training: `torch.distributed.checkpoint` with safetensors files, and a manifest beside them.

A checkpoint is written into a folder beside its own, checked, and renamed: a kill leaves the old one or the new one.
Nothing in it is unpickled. What was saved on some ranks can be loaded on any other number of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samplex_cuda.distributed.head import ShardedClassifier
from samplex_cuda.distributed.layout import Layout

__all__ = ["CheckpointError", "load_checkpoint", "read_checkpoint", "save_checkpoint", "verify_checkpoint"]

_MANIFEST = "manifest.json"
_FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, incomplete or does not fit; the same on every rank."""


def _together(group: Any, problem: str | None, op: str) -> None:
    """CheckpointError on every rank if one of them has a problem."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, problem, group=group)
    for rank, text in enumerate(found):
        if text is not None:
            raise CheckpointError(f"{op}: rank {rank}: {text}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _by_parts(file)


def _by_parts(file: Any) -> str:
    made = hashlib.sha256()
    while part := file.read(1 << 20):
        made.update(part)
    return made.hexdigest()


def _plain(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def _sharded_parameters(modules: Mapping[str, nn.Module]) -> dict[int, ShardedClassifier]:
    """id of each row parameter -> the head that owns it."""
    heads = [m for module in modules.values() for m in _plain(module).modules() if isinstance(m, ShardedClassifier)]
    return {id(p): head for head in heads for p in (head.weight, head.bias) if p is not None}


def _orders(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """In which order each sharded head has its classes."""
    return {
        f"{name}.{path}": module.layout.order
        for name, whole in modules.items()
        for path, module in _plain(whole).named_modules()
        if isinstance(module, ShardedClassifier)
    }


def _tensors_of_modules(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, module in modules.items():
        for key, value in _plain(module).state_dict().items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"save_checkpoint: the state of {name} must hold only tensors, got {key} of {type(value)}"
                )
            found[f"modules.{name}.{key}"] = value
    return found


def _of_samplers(modules: Mapping[str, nn.Module]) -> set[str]:
    """Names of the entries that belong to samplers; their modules check what they are given."""
    return {
        f"modules.{name}.{key}"
        for name, module in modules.items()
        for key, value in _plain(module).state_dict().items()
        if ".sampler." in f".{key}" and not isinstance(value, DTensor)
    }


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _orders_of_rows(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of the tensors with a row for each class, and in which order they have them."""
    order_of = {id(head.mesh): head.layout for head in _sharded_parameters(modules).values()}
    found = {}
    for name, t in tensors.items():
        layout = order_of.get(id(t.device_mesh)) if isinstance(t, DTensor) else None
        if layout is not None and t.shape[0] == layout.num_classes and not name.endswith(".log_eta"):
            found[name] = layout.order
    return found


def _tensors_of_optimizers(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and what can be said in JSON."""
    owners, tensors, rest = _sharded_parameters(modules), {}, {}
    for name, optimizer in optimizers.items():
        state = optimizer.state_dict()
        numbers: dict[str, Any] = {}
        for at, parameter in enumerate(_parameters(optimizer)):
            for key, value in state["state"].get(at, {}).items():
                if not isinstance(value, Tensor):
                    numbers[f"{at}.{key}"] = value
                    continue
                head = owners.get(id(parameter))
                if head is not None and value.shape[:1] == parameter.shape[:1] and value.dim():
                    value = head.as_dtensor(value)
                tensors[f"optimizers.{name}.{at}.{key}"] = value
        rest[name] = {"numbers": numbers, "param_groups": state["param_groups"], "key": state.get("key")}
    return tensors, rest


def save_checkpoint(
    folder: str | os.PathLike[str],
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    extra: Mapping[str, Any] | None = None,
    group: Any = None,
) -> None:
    """Write a checkpoint of modules and optimizers; every rank of the group must call it.

    Args:
        folder: of this checkpoint; replaced if it is there.
        modules: by name; sharded heads, plain modules, modules in DistributedDataParallel or FSDP2.
        optimizers: by name.
        tensors: further ones by name: DTensors, or tensors that are the same on every rank.
        extra: what JSON can hold, e.g. the step and `Key.state_dict()`.
        group: the ranks that write; None: all.

    Example:
        >>> from samplex_cuda.distributed import save_checkpoint
        >>> save_checkpoint("runs/step_100", {"head": head}, {"head": optimizer}, extra={"step": 100})  # doctest: +SKIP
    """
    import torch.distributed.checkpoint as dcp

    folder = Path(folder)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    aside = folder.with_name(f".tmp-{folder.name}")
    problem = None
    found: dict[str, Tensor] = {}
    text = ""
    try:
        found = {**_tensors_of_modules(modules), **{f"tensors.{k}": v for k, v in (tensors or {}).items()}}
        of_optimizers, rest = _tensors_of_optimizers(modules, optimizers or {})
        found |= of_optimizers
        orders, rows = _orders(modules), _orders_of_rows(modules, found)
        text = json.dumps({"orders": orders, "rows": rows, "optimizers": rest, "extra": dict(extra or {})})
        if rank == 0:
            if aside.exists():
                shutil.rmtree(aside)
            aside.mkdir(parents=True)
    except (OSError, TypeError, ValueError) as error:
        problem = str(error)
    _together(group, problem, "save_checkpoint")
    writer = dcp.HuggingFaceStorageWriter(str(aside), save_distributed=True)
    mine: dict[str, Any] = {}
    try:
        dcp.save({k: v.detach() for k, v in found.items()}, storage_writer=writer, process_group=group)
    except dcp.api.CheckpointException as error:  # of any rank; it is raised on all of them
        raise CheckpointError(f"save_checkpoint: {_first_line(error)}") from error
    dist.barrier(group=group)
    try:
        files = sorted(aside.glob("*.safetensors"))
        mine = {path.name: [path.stat().st_size, _digest(path)] for path in files[rank::world]}
    except OSError as error:
        problem = str(error)
    _together(group, problem, "save_checkpoint")
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, mine, group=group)
    if rank == 0:
        try:
            _finish(folder, aside, {k: v for part in parts for k, v in part.items()}, text, world)
        except OSError as error:
            problem = str(error)
    _together(group, problem, "save_checkpoint")


def _first_line(error: Any) -> str:
    """Which rank could not write, and why."""
    for rank, (cause, _) in sorted(error.failures.items()):
        return f"rank {rank}: {cause}"
    return str(error)


def _finish(folder: Path, aside: Path, files: dict[str, Any], text: str, world: int) -> None:
    body = json.loads(text)
    manifest = {"format": _FORMAT, "world": world, "files": files, **body}
    manifest["checksum"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path = aside / _MANIFEST
    with path.open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for name in files:
        with (aside / name).open("rb") as file:
            os.fsync(file.fileno())
    old = _old(folder)
    if old.exists():
        shutil.rmtree(old)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    if old.exists():
        shutil.rmtree(old)


def _old(folder: Path) -> Path:
    """Where the checkpoint of before is while `folder` is replaced."""
    return folder.with_name(f".old-{folder.name}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked by its own checksum; the files that it names are not."""
    if not (folder / _MANIFEST).exists():
        raise CheckpointError(f"{folder.name} has no {_MANIFEST}: it is not a checkpoint, or is incomplete")
    manifest = json.loads((folder / _MANIFEST).read_text())
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != _FORMAT
        or not isinstance(manifest.get("files"), dict)
    ):
        raise CheckpointError(f"{folder.name}/{_MANIFEST} must have format {_FORMAT}")
    told = manifest.pop("checksum", None)
    if told != hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest():
        raise CheckpointError(f"{folder.name}/{_MANIFEST} was changed: its checksum does not fit")
    return manifest


def _check_files(folder: Path, manifest: dict[str, Any], rank: int, world: int) -> None:
    """The files that fall to this rank."""
    names = sorted(manifest["files"])
    there = sorted(path.name for path in folder.glob("*.safetensors"))
    if names != there:
        raise CheckpointError(f"{folder.name} must hold {len(names)} files of tensors, got {len(there)}")
    for name in names[rank::world]:
        path = folder / name
        size, digest = manifest["files"][name]
        if Path(name).name != name or path.is_symlink():
            raise CheckpointError(f"{folder.name}: {name} must be a file in that folder")
        if path.stat().st_size != size or _digest(path) != digest:
            raise CheckpointError(f"{folder.name}/{name} is damaged: its checksum does not fit")


def load_checkpoint(
    folder: str | os.PathLike[str],
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    group: Any = None,
) -> dict[str, Any]:
    """Load what `save_checkpoint` wrote, on any number of ranks; every rank of the group must call it.

    Checksums are compared before anything is loaded.

    Args:
        folder: of the checkpoint.
        modules: by the names of the save.
        optimizers: by the names of the save.
        tensors: by the names of the save; they are filled in place.
        group: the ranks that load; None: all.

    Returns:
        `extra` of the save.

    Example:
        >>> from samplex_cuda.distributed import load_checkpoint
        >>> step = load_checkpoint("runs/step_100", {"head": head}, {"head": optimizer})["step"]  # doctest: +SKIP
    """
    import torch.distributed.checkpoint as dcp

    folder = Path(folder)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    problem, manifest = None, {}
    wanted: dict[str, Tensor] = {}
    if rank == 0 and not folder.exists() and _old(folder).exists():
        _old(folder).rename(folder)  # a save was killed between its two renames
    dist.barrier(group=group)
    try:
        manifest = read_manifest(folder)
        _check_files(folder, manifest, rank, world)
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        problem = str(error)
    _together(group, problem, "load_checkpoint")
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        for name, order in _orders(modules).items():
            if (saved := manifest["orders"].get(name)) != order:
                raise CheckpointError(f"{name} must be sharded with order={saved!r} as it was saved, got {order!r}")
        stored: Any = reader.read_metadata().state_dict_metadata
        wanted = {k: v.detach() for k, v in _tensors_of_modules(modules).items()}
        wanted |= {f"tensors.{k}": v.detach() for k, v in (tensors or {}).items()}
        wanted |= _room_for_optimizers(modules, optimizers or {}, stored, manifest)
        missing = sorted(set(wanted) - set(stored))
        if missing:
            raise CheckpointError(f"{folder.name} has no {missing[0]}")
        for name in _of_samplers(modules) & wanted.keys():  # of samplers: their sizes are what was fitted
            if tuple(stored[name].size) != tuple(wanted[name].shape):
                wanted[name] = torch.empty(stored[name].size, dtype=wanted[name].dtype, device=wanted[name].device)
        for name, t in wanted.items():
            if tuple(stored[name].size) != tuple(t.shape) or stored[name].properties.dtype != t.dtype:
                size, dtype = list(stored[name].size), stored[name].properties.dtype
                raise CheckpointError(f"{name} must be {list(t.shape)} {t.dtype}, got {size} {dtype}")
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        problem = str(error)
    _together(group, problem, "load_checkpoint")
    dcp.load(wanted, storage_reader=reader, process_group=group)
    for name, module in modules.items():
        start = f"modules.{name}."
        _plain(module).load_state_dict({k.removeprefix(start): v for k, v in wanted.items() if k.startswith(start)})
    for name, optimizer in (optimizers or {}).items():
        _load_optimizer(name, optimizer, wanted, manifest["optimizers"][name])
    extra: dict[str, Any] = manifest["extra"]
    return extra


def verify_checkpoint(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Compare every file of a checkpoint with its checksum, in one process; the manifest. CheckpointError if one fails.

    Example:
        >>> from samplex_cuda.distributed import CheckpointError, verify_checkpoint
        >>> try:
        ...     verify_checkpoint("no/such/step_100")
        ... except CheckpointError as error:
        ...     print(error)
        step_100 has no manifest.json: it is not a checkpoint, or is incomplete
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
        _check_files(folder, manifest, 0, 1)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder.name}: {error}") from None
    return manifest


def read_checkpoint(
    folder: str | os.PathLike[str], prefixes: tuple[str, ...] = ("",)
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor of a checkpoint as a whole, on the CPU of one process, and the manifest; no group is needed.

    Rows of class tables and of their optimizer states are in the order of classes, as a head that is not sharded has
    them.

    Args:
        folder: of the checkpoint; checked first.
        prefixes: names that are read begin with one of these.

    Returns:
        (tensors, manifest). Names are "modules.NAME.KEY", "optimizers.NAME.NUMBER.KEY" and "tensors.KEY";
        `manifest["extra"]` is what `save_checkpoint` was given.

    Example:
        >>> from samplex_cuda.distributed import read_checkpoint
        >>> tensors, manifest = read_checkpoint("runs/step_100")  # doctest: +SKIP
    """
    import torch.distributed.checkpoint as dcp

    manifest = verify_checkpoint(folder)
    reader = dcp.HuggingFaceStorageReader(str(folder))
    stored: Any = reader.read_metadata().state_dict_metadata
    chosen = {name: told for name, told in stored.items() if name.startswith(prefixes)}
    found = {name: torch.empty(told.size, dtype=told.properties.dtype) for name, told in chosen.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked
        dcp.load(found, storage_reader=reader, no_dist=True)
    for name in chosen.keys() & manifest["rows"].keys():
        classes = found[name].shape[0]
        slots = Layout(classes, 1, 0, manifest["rows"][name]).slot(torch.arange(classes))
        found[name] = found[name][slots]
    return {k: v for k, v in found.items() if not k.endswith(".slot_step")}, manifest


def _room_for_optimizers(
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    stored: Any,
    manifest: dict[str, Any],
) -> dict[str, Tensor]:
    """Empty tensors for the stored state of optimizers that may have none yet."""
    owners = _sharded_parameters(modules)
    room: dict[str, Tensor] = {}
    for name, optimizer in optimizers.items():
        if name not in manifest.get("optimizers", {}):
            raise CheckpointError(f"there is no optimizer {name!r}")
        parameters = _parameters(optimizer)
        for key, told in stored.items():
            start = f"optimizers.{name}."
            if not key.startswith(start):
                continue
            at = int(key.removeprefix(start).partition(".")[0])
            if at >= len(parameters):
                raise CheckpointError(f"optimizer {name!r} must have more than {at} parameters, got {len(parameters)}")
            parameter, dtype = parameters[at], told.properties.dtype
            head = owners.get(id(parameter))
            if head is not None and told.size[:1] == (head.num_classes,):
                rows = torch.empty(parameter.shape[0], *told.size[1:], dtype=dtype, device=parameter.device)
                room[key] = head.as_dtensor(rows)
            elif tuple(told.size) == tuple(parameter.shape):
                room[key] = torch.empty_like(parameter, dtype=dtype).detach()
            else:
                room[key] = torch.empty(told.size, dtype=dtype, device=parameter.device)
    return room


def _load_optimizer(name: str, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], told: Any) -> None:
    state: dict[int, dict[str, Any]] = {}
    for at, parameter in enumerate(_parameters(optimizer)):
        start = f"optimizers.{name}.{at}."
        mine: dict[str, Any] = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        if not isinstance(parameter, DTensor):
            mine = {k: _local(v) for k, v in mine.items()}
        mine |= {k.partition(".")[2]: v for k, v in told["numbers"].items() if k.partition(".")[0] == str(at)}
        if mine:
            state[at] = mine
    given: dict[str, Any] = {"state": state, "param_groups": told["param_groups"]}
    if told.get("key") is not None:
        given["key"] = told["key"]
    optimizer.load_state_dict(given)


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t
