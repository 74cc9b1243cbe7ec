"""Stand-ins for a GPU: what would wait for the device, and a CUDA graph that replays the ops of a step on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# Ops that read numbers of the device on the host: a value, or the size of their result.
_WAITS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive", "bincount", "_coalesce", "_to_sparse", "histc", "multinomial",
}  # fmt: skip
_INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_"}


def waits(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this op would make the host wait for a GPU, were its tensors there."""
    name = func._schema.name.removeprefix("aten::")
    if name == "repeat_interleave":
        return True
    masks = args[1] if name in _INDEXING and len(args) > 1 else ()
    return name in _WAITS or any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in masks)


class SyncGuard(TorchDispatchMode):
    """Collects the ops of a block that would wait for a GPU, and the number of all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.ops.append(func._schema.name)
        if waits(func, args):
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class RecordedGraph:
    """`torch.cuda.CUDAGraph` on a CPU: the calls of a block, run again with the very same arguments.

    Python does not run in a replay, so that numbers of the host are those of the recording. A tensor that a call made
    is made again; all others are read where they are.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def replay(self) -> None:
        """Run the calls again, and put the results where those of the recording are."""
        made: dict[int, Tensor] = {}

        def current(t: Tensor) -> Tensor:
            return made.get(id(t), t)

        with torch.no_grad():
            for func, args, kwargs, outputs in self.calls:
                found = func(*tree_map_only(Tensor, current, args), **tree_map_only(Tensor, current, kwargs))
                for old, new in zip(outputs, _tensors(found), strict=True):
                    made[id(old)] = new
            for *_, outputs in self.calls:
                for old in outputs:
                    new = made[id(old)]
                    if new is not old and new.numel() and not new._is_view() and new.data_ptr() != old.data_ptr():
                        old.detach().copy_(new)


def _tensors(found: Any) -> list[Tensor]:
    out: list[Tensor] = []
    tree_map_only(Tensor, out.append, found)
    return out


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that the op changes."""
    named = {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(func._schema.arguments)}
    changed = [named[a.name] for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors(changed)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        assert not waits(func, args), f"{func} would wait for the device inside of a graph"
        self.before += [(t, t.clone()) for t in _written(func, args, kwargs or {})]
        found = func(*args, **(kwargs or {}))
        self.graph.calls.append((func, args, kwargs or {}, _tensors(found)))
        return found


@contextmanager
def recording(graph: RecordedGraph) -> Iterator[None]:
    """`torch.cuda.graph` on a CPU. The block runs while it is recorded, and is undone: a capture runs nothing."""
    with _Recorder(graph) as recorder:
        yield
    with torch.no_grad():
        for t, value in reversed(recorder.before):
            t.detach().copy_(value)
