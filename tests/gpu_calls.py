"""Counts the ops that would launch a kernel on a GPU, on tensors of any device, the meta device too."""

from __future__ import annotations

import collections
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::promote_types", "samplex::predict_buffer")


class Calls(TorchDispatchMode):
    """`made`: how often each op was called, by name; not those that only make a view or memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name not in NO_KERNEL:
            self.made[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))
