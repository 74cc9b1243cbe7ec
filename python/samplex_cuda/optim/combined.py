"""`Combined`: one optimizer for a model with a dense part and class tables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samplex_cuda.optim.base import RowOptimizer
from samplex_cuda.optim.row_gradient import keep_rows

__all__ = ["Combined", "split_parameters"]


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of a model for the two optimizers of `Combined`: dense ones, and class tables.

    A class table is the weight or bias of a module with `sparse=True`: `SampledClassifier`, `nn.Embedding` and
    `nn.EmbeddingBag`. A parameter that several modules share counts once.

    Args:
        model: with at least one such module.

    Returns:
        (dense, rows), those that require a gradient.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), head)
        >>> dense, rows = sx.optim.split_parameters(model)
        >>> [list(p.shape) for p in dense], [list(p.shape) for p in rows]
        ([[8, 4], [8]], [[100, 8], [100]])
    """
    tables: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if getattr(module, "sparse", False) is True:
            for name in ("weight", "bias"):
                p = getattr(module, name, None)
                if isinstance(p, nn.Parameter) and p.requires_grad:
                    tables[id(p)] = p
    if not tables:
        raise ValueError("split_parameters: model must have a module with sparse=True, got none")
    return [p for p in model.parameters() if p.requires_grad and id(p) not in tables], list(tables.values())


class _BothStates(MutableMapping[Tensor, Any]):
    """The state of both optimizers by parameter."""

    def __init__(self, dense: Optimizer, rows: Optimizer) -> None:
        self._both = (dense, rows)

    def _of(self, p: Tensor) -> Any:
        dense, rows = self._both
        return rows.state if any(p is q for group in rows.param_groups for q in group["params"]) else dense.state

    def __getitem__(self, p: Tensor) -> Any:
        return self._of(p)[p]

    def __setitem__(self, p: Tensor, value: Any) -> None:
        self._of(p)[p] = value

    def __delitem__(self, p: Tensor) -> None:
        del self._of(p)[p]

    def __iter__(self) -> Iterator[Tensor]:
        return iter([*self._both[0].state, *self._both[1].state])

    def __len__(self) -> int:
        return len(self._both[0].state) + len(self._both[1].state)


class Combined(Optimizer):
    """A dense optimizer and a row optimizer as one: one `step`, one `zero_grad`, one `state_dict`, one scheduler.

    The parameter groups are those of `dense`, then those of `rows`, the very dictionaries: schedulers of torch change
    the rates of both. Backward leaves the sparse gradients of the row tables as `RowGradient`s, so that
    `torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` count and change them with the dense ones, in any
    trainer that calls them. The rows are updated in `step()`. Gradients of several backwards are summed, and so
    are those of a table that is tied to an `nn.Embedding(sparse=True)`: one reduction, one update.

    Args:
        dense: an optimizer of torch for the rest of the model.
        rows: `RowSGD`, `RowAdagrad` or `RowAdam` for the class tables.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> encoder, head = torch.nn.Linear(4, 8), sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), 5)
        >>> optimizer = sx.optim.Combined(
        ...     dense=torch.optim.AdamW(encoder.parameters()), rows=sx.optim.RowAdam(head.parameters())
        ... )
        >>> head(encoder(torch.randn(4, 4)), torch.arange(4)).backward()
        >>> norm = torch.nn.utils.clip_grad_norm_([*encoder.parameters(), *head.parameters()], 1.0)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(self, dense: Optimizer, rows: RowOptimizer) -> None:
        if not isinstance(dense, Optimizer) or isinstance(dense, RowOptimizer | Combined):
            raise TypeError(f"Combined: dense must be an optimizer of torch.optim, got {type(dense).__name__}")
        if not isinstance(rows, RowOptimizer):
            raise TypeError(f"Combined: rows must be an optimizer of samplex_cuda.optim, got {type(rows).__name__}")
        tables = [p for group in rows.param_groups for p in group["params"]]
        both = [p for group in dense.param_groups for p in group["params"] if any(p is q for q in tables)]
        if both:
            raise ValueError(
                f"Combined: dense must not own parameters of rows, got {len(both)}, the first {list(both[0].shape)}"
            )
        self.dense, self.rows = dense, rows
        super().__init__([*dense.param_groups, *rows.param_groups], {})
        self.defaults = dense.defaults
        self.state = _BothStates(dense, rows)  # type: ignore[assignment]
        alive = weakref.ref(self)
        self._handles = [keep_rows(p, lambda: alive() is not None) for p in tables]
        self._ready = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made of copies of both."""
        return Combined, (self.dense, self.rows)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to `dense`; for a class table make `rows` with it.

        Args:
            param_group: "params" and whatever is to differ from the defaults.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> a, b, table = (torch.zeros(3, 2, requires_grad=True) for _ in range(3))
            >>> optimizer = sx.optim.Combined(torch.optim.SGD([a], lr=0.1), sx.optim.RowSGD([table], lr=0.1))
            >>> optimizer.add_param_group({"params": [b]})
            >>> len(optimizer.dense.param_groups), len(optimizer.param_groups)
            (2, 3)
        """
        if not getattr(self, "_ready", False):  # inside the constructor of torch
            super().add_param_group(param_group)
            return
        self.dense.add_param_group(param_group)
        self._join()

    def _join(self) -> None:
        self.param_groups[:] = [*self.dense.param_groups, *self.rows.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both.

        Args:
            closure: computes the loss again and returns it; optional.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.dense.step()
        self.rows.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in `torch.optim.Optimizer`, for both.

        Args:
            set_to_none: drop the gradients instead of filling them with zeros.
        """
        self.dense.zero_grad(set_to_none)
        self.rows.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """In the form of `torch.optim.Optimizer`: parameters are numbered through, those of `dense` first.

        Example:
            >>> import torch, samplex_cuda as sx
            >>> dense, table = torch.zeros(2, requires_grad=True), torch.zeros(3, 2, requires_grad=True)
            >>> optimizer = sx.optim.Combined(torch.optim.SGD([dense]), sx.optim.RowAdagrad([table]))
            >>> state = optimizer.state_dict()
            >>> [group["params"] for group in state["param_groups"]], list(state["state"])
            ([[0], [1]], [1])
        """
        dense, rows = self.dense.state_dict(), self.rows.state_dict()
        first = sum(len(group["params"]) for group in dense["param_groups"])
        moved = [{**group, "params": [first + n for n in group["params"]]} for group in rows["param_groups"]]
        return {
            **dense,
            **{name: value for name, value in rows.items() if name not in ("state", "param_groups")},
            "state": {**dense["state"], **{first + n: value for n, value in rows["state"].items()}},
            "param_groups": [*dense["param_groups"], *moved],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave; the groups are checked before anything changes.

        Args:
            state_dict: of a `Combined` with the same groups.
        """
        groups = state_dict["param_groups"]
        have, given = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in groups]
        if have != given:
            raise ValueError(f"Combined.load_state_dict: parameters by group must be {have}, got {given}")
        of_dense, of_rows = groups[: len(self.dense.param_groups)], groups[len(self.dense.param_groups) :]
        numbers = {n for group in of_rows for n in group["params"]}
        state = state_dict["state"]
        rest = {name: value for name, value in state_dict.items() if name not in ("state", "param_groups")}
        self.rows.load_state_dict(
            {**rest, "state": {n: v for n, v in state.items() if n in numbers}, "param_groups": of_rows}
        )
        self.dense.load_state_dict(
            {"state": {n: v for n, v in state.items() if n not in numbers}, "param_groups": of_dense}
        )
        self._join()
