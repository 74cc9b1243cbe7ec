"""`HeadChooser`: a head in a loop of your own that chooses how it draws, by measured cost and gradient error."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplex_cuda import samplers
from samplex_cuda._checks import check_int, describe
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.rng import Key
from samplex_cuda.training.chooser import Chooser

__all__ = ["HEAD_WAYS", "HeadChooser", "Way"]

_ROWS = 128  # of a batch that are looked at, at most
_GIVEN = "as given"


class Way(NamedTuple):
    """How a head draws.

    Attributes:
        kind: "static": the sampler that the head has at first; "midx"; "rff": half positive features, half the first.
        num_samples: m.
        shared: whether the batch shares them.
        stratified: whether shared draws are stratified; "midx" only.

    Example:
        >>> from samplex_cuda.training import Way
        >>> Way("midx", 1024, shared=True, stratified=True).num_samples
        1024
    """

    kind: str
    num_samples: int
    shared: bool = False
    stratified: bool = False


HEAD_WAYS = {
    "static, shared, 1024": Way("static", 1024, True),
    "static, shared, 4096": Way("static", 4096, True),
    "static, per row, 64": Way("static", 64),
    "midx, stratified, 1024": Way("midx", 1024, True, True),
    "midx, per row, 64": Way("midx", 64),
    "rff, per row, 64": Way("rff", 64),
}


class HeadChooser(Chooser):
    """Chooses how a head draws, at fixed steps, as `sampler.choose_every` does in a run; see docs/auto.md.

    The first step measures what a step of each way costs. From then on no clock is read: a choice is a function of
    these numbers, of the weights and of the seed. `state_dict` has the costs, so that a resumed loop makes the same
    choices.

    Args:
        head: with plain sampled softmax and a static sampler, which is one of the candidates and part of others.
        every: steps between two choices; more where looking would take more than 2 % of the time.
        ways: the candidates besides the head as it is, by name.
        seed: of the draws that are looked at, and of the samplers that are made.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> from samplex_cuda.training import HeadChooser
        >>> head = sx.SampledClassifier(8, 200, sx.samplers.Uniform(200), num_samples=20)
        >>> chooser = HeadChooser(head, every=100)
        >>> h, y = torch.randn(16, 8), torch.randint(200, (16,))
        >>> chooser.step(h, y)  # before head(h, y); the reason at a choice
        ''
        >>> head(h, y).backward()
        >>> chooser.present
        'as given'
    """

    def __init__(
        self, head: SampledClassifier, *, every: int = 1000, ways: Mapping[str, Way] = HEAD_WAYS, seed: int = 0
    ) -> None:
        check_int("HeadChooser", "every", every, 1)
        check_int("HeadChooser", "seed", seed, 0)
        if not isinstance(head, SampledClassifier):
            raise TypeError(f"HeadChooser: head must be a SampledClassifier, got {type(head).__name__}")
        loss = head.loss
        if not (loss.needs.draws and loss.joins) or loss.absolute or head.normalize or head.unique:
            raise ValueError(
                f"HeadChooser: head must have a plain sampled_softmax loss, no normalize and no unique, got {loss!r}, "
                f"normalize={head.normalize}, unique={head.unique}"
            )
        if not isinstance(head.sampler, samplers.StaticSampler):
            raise ValueError(
                "HeadChooser: head must have a static sampler at first, such as Unigram(counts), got "
                f"{type(head.sampler).__name__}"
            )
        if head.host is not None:
            raise ValueError("HeadChooser: head must have its class table on its own device, got a host table")
        self._every, self._seed = every, seed
        self._head, self._static = head, head.sampler
        self._ways = {_GIVEN: Way("static", head.num_samples, head.shared, head.stratified), **ways}
        for name, way in self._ways.items():
            if way.kind not in ("static", "midx", "rff") or (way.stratified and way.kind != "midx"):
                raise ValueError(
                    f'HeadChooser: ways must be of kind "static", "midx" or "rff", stratified with midx only, got '
                    f"{name}: {way}"
                )
        self.ways = list(self._ways)
        self.present = _GIVEN
        self.costs: dict[str, float] = {}
        self.look_ms = 0.0
        self.history: list[dict[str, Any]] = []
        self.steps = 0
        self.batch = 0
        self._seen: tuple[Tensor, Tensor] | None = None

    def step(self, h: Tensor, y: Tensor) -> str:  # type: ignore[override]
        """To be called before `head(h, y)` in every training step: chooses when it is time.

        Args:
            h: [*, d], as for the head.
            y: int64 [*], targets; of rows with several, [*, P], the first counts.

        Returns:
            The way and the reason at a choice, else nothing.
        """
        width = self._head.in_features
        if not isinstance(h, Tensor) or h.dim() < 1 or h.shape[-1] != width:
            raise ValueError(f"HeadChooser: h must be [*, {width}], got {describe(h)}")
        rows = h.numel() // width
        if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.shape[: h.dim() - 1] != h.shape[:-1]:
            raise ValueError(
                f"HeadChooser: y must be int64 of the shape of h without its last dimension, got {describe(y)}"
            )
        told = ""
        if not self.costs or self.steps % self.interval == 0:
            several = y.detach().reshape(rows, -1)
            first = several.gather(1, (several >= 0).to(torch.int64).argmax(1, keepdim=True))[:, 0]
            there = (first >= 0).nonzero().squeeze(1)[:_ROWS]
            if there.numel() == 0:
                return ""  # no target to look at: the choice waits for the next batch
            self.batch = self.batch or rows
            self._seen = h.detach().reshape(rows, width)[there].to(self._head.weight.dtype), first[there]
            told = super().step(self.steps, None, self._head)  # type: ignore[arg-type]
            self._seen = None
        self.steps += 1
        return told

    # ------------------------------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the head: plain numbers and names.

        Example:
            >>> import samplex_cuda as sx
            >>> from samplex_cuda.training import HeadChooser
            >>> head = sx.SampledClassifier(8, 200, sx.samplers.Uniform(200), num_samples=20)
            >>> sorted(HeadChooser(head).state_dict())
            ['batch', 'costs', 'history', 'look_ms', 'present', 'steps']
        """
        return copy.deepcopy(self.state()) | {"steps": self.steps, "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`, and gives the head a sampler of the present kind. Load the head's own state after it.

        Example:
            >>> import samplex_cuda as sx
            >>> from samplex_cuda.training import HeadChooser
            >>> head = sx.SampledClassifier(8, 200, sx.samplers.Uniform(200), num_samples=20)
            >>> chooser = HeadChooser(head)
            >>> chooser.load_state_dict(chooser.state_dict() | {"present": "midx, per row, 64"})
            >>> type(head.sampler).__name__, head.num_samples
            ('MIDX', 64)
        """
        self.restore(state, None, self._head)  # type: ignore[arg-type]
        self.steps, self.batch = int(state["steps"]), int(state["batch"])

    # ------------------------------------------------------------------------------------------ instead of a run
    @property
    def every(self) -> int:
        """Steps between two choices, as asked for."""
        return self._every

    @property
    def seed(self) -> int:
        """Of the draws that are looked at, and of the samplers that are made."""
        return self._seed

    def config_of(self, way: str) -> Any:
        """What the choice reads of a way, as from the configuration of a run."""
        return SimpleNamespace(head=self._ways[way])

    def _stored(self) -> None:
        return None

    def _write(self, name: str, what: Any) -> None:
        """Nothing: a loop of one's own has no run folder."""

    def _rows(self, encoder: Any, head: SampledClassifier) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        assert self._seen is not None
        h, y = (t[: self._most_rows(head)] for t in self._seen)
        return h, y, h, None

    def _sampler_key(self, way: str) -> str:
        return self._ways[way].kind

    def _policy(self, config: Any, head: SampledClassifier) -> Any:
        return "auto"

    def _make(self, way: str, encoder: Any, head: SampledClassifier, fit: bool) -> samplers.Sampler:
        kind, weight, key = self._ways[way].kind, head.weight.detach(), Key(self._seed)
        bias = None if head.bias is None else head.bias.detach()
        if kind == "static":
            return self._static
        if kind == "midx":
            return samplers.MIDX(weight, scale=head.scale, bias=bias, key=key)
        features = samplers.RandomFourier(weight, 1024, head.scale, "positive", bias=bias, epsilon=0.01, key=key)
        return samplers.Mixture([(features, 0.5), (self._static, 0.5)])
