"""A training step as one CUDA graph: recorded once, replayed with new data, keys and rates. See docs/cuda_graphs.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samplex_cuda._checks import check_int, describe
from samplex_cuda.rng import Key

__all__ = ["CapturedStep", "capture_step"]

_NAME = "capture_step"


def _on_gpu(inputs: tuple[Tensor, ...]) -> bool:
    return bool(inputs) and inputs[0].is_cuda


class CapturedStep:
    """A training step that becomes a CUDA graph after a few calls; made by `capture_step`.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> step = sx.graphs.capture_step(lambda x: x.sum())
        >>> step(torch.ones(3)), step.captured
        (tensor(3.), False)
    """

    def __init__(
        self, step: Callable[..., Any], key: Key | None, warmup: int, device: torch.device | str | None
    ) -> None:
        if not callable(step):
            raise TypeError(f"{_NAME}: step must be callable, got {type(step).__name__}")
        if key is not None and not isinstance(key, Key):
            raise TypeError(f"{_NAME}: key must be a Key or None, got {type(key).__name__}")
        check_int(_NAME, "warmup", warmup)
        self.step, self.key, self.warmup = step, key, warmup
        self.device = None if device is None else torch.device(device)
        self._calls = 0
        self._inputs: tuple[Tensor, ...] = ()  # what the graph reads
        self._pair: Tensor | None = None  # the reserved key
        self._graph: Any = None
        self._output: Any = None

    @property
    def captured(self) -> bool:
        """Whether calls replay a graph."""
        return self._graph is not None

    def __call__(self, *inputs: Tensor) -> Any:
        """One step on these tensors.

        Args:
            inputs: what `step` takes, in the shapes and dtypes of the first call, on any device (pinned memory is
                copied without a wait).

        Returns:
            What `step` returned. Tensors of a captured step are overwritten by the next call.
        """
        for number, x in enumerate(inputs):
            if not isinstance(x, Tensor):
                raise TypeError(f"{_NAME}: input {number} must be a Tensor, got {type(x).__name__}")
        if not self._calls:
            self._inputs = tuple(torch.empty_like(x, device=self.device or x.device) for x in inputs)
        self._read(inputs)
        self._calls += 1
        if self._graph is None:
            if not _on_gpu(self._inputs):
                return self._run()
            if self._calls <= self.warmup:
                return self._on_side_stream()
            self._capture()
        self._graph.replay()
        return self._output

    def _read(self, inputs: tuple[Tensor, ...]) -> None:
        """Copies inputs and the next key to where the graph reads them."""
        if len(inputs) != len(self._inputs):
            raise ValueError(
                f"{_NAME}: inputs must be {len(self._inputs)} tensors as in the first call, got {len(inputs)}"
            )
        for number, (x, own) in enumerate(zip(inputs, self._inputs, strict=True)):
            if x.shape != own.shape or x.dtype != own.dtype:
                raise ValueError(
                    f"{_NAME}: input {number} must be {describe(own)} as in the first call, got {describe(x)}; drop "
                    "the last short batch, or call the step itself with it"
                )
            own.copy_(x.detach(), non_blocking=True)
        if self.key is not None:
            device = self._inputs[0].device if self._inputs else torch.device("cpu")
            self._pair = self.key.reserve(device, out=self._pair)

    def _run(self) -> Any:
        return self.step(*self._inputs) if self._pair is None else self.step(*self._inputs, key=self._pair)

    def _on_side_stream(self) -> Any:
        """Before a capture torch asks for some runs on another stream than the default one."""
        now, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(now)
        with torch.cuda.stream(side):
            output = self._run()
        now.wait_stream(side)
        return output

    def _capture(self) -> None:
        """Records the step; nothing of it runs."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._output = self._run()
        self._graph = graph


def capture_step(
    step: Callable[..., Any], *, key: Key | None = None, warmup: int = 3, device: torch.device | str | None = None
) -> CapturedStep:
    """Run a whole training step (encoder, head, update) as one CUDA graph: a single launch instead of dozens.

    The first `warmup` calls run the step as it is, the next one records it, and from then on each call copies its
    inputs to where the graph reads them and replays it. Every call is one step of training: nothing runs twice. On a
    CPU the step always runs unchanged.

    A graph repeats the same kernels on the same memory, so whatever changes from step to step must be a tensor that is
    written in place: the batch (this does it), the key of the draws (`key`), rates and step counts (optimizers with
    `capturable=True`, whose schedulers write into the rate). docs/cuda_graphs.md lists the rest.

    Args:
        step: takes tensors, trains on them, and returns tensors such as the loss. With `key` it takes `key=` too.
        key: where the draws come from, passed on as its reserved tensor and moved by one in each call, so that they are
            those of a run without a graph. By default draws come from torch's generator, which graphs know.
        warmup: calls before the step is recorded, at least 1.
        device: where `step` wants its inputs; by default where those of the first call are.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> head = sx.SampledClassifier(8, 100, sx.samplers.Uniform(100), num_samples=5)
        >>> head.fuse_optimizer(sx.optim.RowAdam(head.parameters(), lr=0.1, capturable=True))
        >>> def train(h, y, key):
        ...     loss = head(h, y, key=key)
        ...     loss.backward()
        ...     return loss.detach()
        >>> step = sx.graphs.capture_step(train, key=sx.Key(0))
        >>> losses = [step(torch.randn(4, 8), torch.arange(4)) for _ in range(5)]
        >>> head.fused.optimizer.state[head.weight]["step"]
        tensor(5.)
    """
    return CapturedStep(step, key, warmup, device)
