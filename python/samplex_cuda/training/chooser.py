"""`sampler.choose_every`: a run that chooses its sampler by measured cost and gradient error (docs/auto.md)."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samplex_cuda import functional, samplers
from samplex_cuda.data import Dataset
from samplex_cuda.diagnostics import timing
from samplex_cuda.diagnostics.gradient_error import Rows
from samplex_cuda.heads import SampledClassifier
from samplex_cuda.heads.leak import leaks
from samplex_cuda.rng import fold_in
from samplex_cuda.training import checkpoint, models
from samplex_cuda.training import config as configs
from samplex_cuda.training.config import Config
from samplex_cuda.training.encoders import Encoder
from samplex_cuda.training.sampler_factory import make_sampler
from samplex_cuda.training.watch import some_rows

__all__ = ["LEAKY", "WAYS", "Chooser", "best_way", "gradient_noise"]

LEAKY = 0.1  # a way that leaks more is barred
_OVERHEAD = 0.02  # share of the time that looking may take
_GAIN = 0.9  # another way must be so much cheaper than the present one
_REPEATS = 8  # gradients of other draws for each error
_NUMBERS = 1 << 22  # rows x classes of a look
_LEAST_ROWS, _TIMED_ROWS = 8, 8192

# Name: what it changes in the configuration. The first word is the one of `sampler.candidates`.
WAYS: dict[str, tuple[str, ...]] = {
    "unigram, shared, 1024": ("sampler.name=unigram", "head.shared=true", "head.num_samples=1024"),
    "unigram, shared, 4096": ("sampler.name=unigram", "head.shared=true", "head.num_samples=4096"),
    "unigram, per row, 64": ("sampler.name=unigram", "head.shared=false", "head.num_samples=64"),
    "tree, shared, 1024": ("sampler.name=tree", "head.shared=true", "head.num_samples=1024"),
    "tree, per row, 64": ("sampler.name=tree", "head.shared=false", "head.num_samples=64"),
    "midx, stratified, 1024": (
        "sampler.name=midx", "head.shared=true", "head.stratified=true", "head.num_samples=1024"
    ),
    "midx, per row, 64": ("sampler.name=midx", "head.shared=false", "head.num_samples=64"),
    "rff, per row, 64": ("sampler.name=rff", "head.shared=false", "head.num_samples=64"),
}  # fmt: skip
_ALIKE = ("sampler.base=auto", "sampler.features=hidden", "head.stratified=false")


@torch.no_grad()
def gradient_noise(
    head: SampledClassifier,
    h: Tensor,
    target: Tensor,
    draw: Any,
    num_samples: int,
    batch: int,
    key: Tensor,
) -> tuple[float, float]:
    """Squared error of the gradient of the class table, and its variance between batches; see docs/auto.md.

    Args:
        head: its logits count, not its sampler.
        h: [n, d], rows to look at.
        target: int64 [n].
        draw: gives a `Draw` for a key, per row without the targets, or shared.
        num_samples: m.
        batch: rows of a batch, B: what the n rows tell is carried over to so many.
        key: int64 [2].

    Returns:
        E ||sampled - full||^2 of the mean over a batch, bias included, and the variance of the full gradient's mean.

    Example:
        >>> import torch, samplex_cuda as sx
        >>> from samplex_cuda.training.chooser import gradient_noise
        >>> head = sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), num_samples=5)
        >>> h, y = torch.randn(8, 4), torch.randint(50, (8,))
        >>> def draw(m):
        ...     return lambda key: head.sampler.sample(h, m, exclude=y, key=key)
        >>> few, many = (gradient_noise(head, h, y, draw(m), m, 8, torch.tensor([1, 2]))[0] for m in (5, 500))
        >>> many < few
        True
    """
    rows, n = Rows(head, h, target), h.shape[0]
    logits = rows.logits(slice(0, n))
    full = (logits - rows.lse[:, None]).exp_()
    each = torch.arange(n, device=h.device)
    full[each, target] -= 1.0
    alike = h.double() @ h.double().T

    def split(of: Tensor) -> Tensor:
        """Mean of <row a, row b> for a = b and for a != b."""
        product = alike * (of @ of.T)
        own = product.diagonal().sum()
        return torch.stack([own / n, (product.sum() - own) / max(1, n * (n - 1))])

    apart, together = split(full).tolist()
    found = torch.zeros(2, dtype=torch.float64, device=h.device)
    for number in range(_REPEATS):
        drawn = draw(fold_in(key, number))
        ids = drawn.ids.expand(n, -1)
        score = logits.gather(1, ids) - drawn.log_q.double() - math.log(num_samples)
        score = torch.where(ids == target[:, None], -math.inf, score)
        share = torch.softmax(torch.cat([score, rows.target_logit[:, None]], 1), 1)
        off = -full
        off[each, target] += share[:, -1] - 1.0
        found += split(off.scatter_add_(1, ids, share[:, :-1])) / _REPEATS
    own, cross = found.tolist()
    return max(0.0, own / batch + max(0.0, cross) * (batch - 1) / batch), max(0.0, apart - together) / batch


def best_way(looks: dict[str, dict[str, float]], costs: dict[str, float], present: str) -> tuple[str, str]:
    """The way with the least time for a gradient of equal noise, and why.

    Args:
        looks: of each way: "error" and "batch" (`gradient_noise`) and "leak".
        costs: milliseconds of a step of each way.
        present: the way now; another must be clearly better.

    Example:
        >>> from samplex_cuda.training.chooser import best_way
        >>> looks = {"a": {"error": 3.0, "batch": 1.0, "leak": 0.0}, "b": {"error": 0.5, "batch": 1.0, "leak": 0.0}}
        >>> best_way(looks, {"a": 1.0, "b": 2.0}, "a")
        ('b', 'ms of a step x squared noise of its gradient: a: 4; b: 3')
        >>> best_way(looks | {"b": looks["b"] | {"leak": 0.5}}, {"a": 1.0, "b": 2.0}, "a")[0]
        'a'
    """
    allowed = {name: look for name, look in looks.items() if look["leak"] <= LEAKY}
    if not allowed:
        name = min(looks, key=lambda one: (looks[one]["leak"], one))
        return name, f"all ways leak more than {LEAKY:g}; this one least, {looks[name]['leak']:.2f}"

    def score(name: str) -> float:
        return costs[name] * (looks[name]["batch"] + looks[name]["error"])

    best = min(allowed, key=lambda one: (score(one), one))
    if present in allowed and not score(best) < _GAIN * score(present):
        best = present
    barred = [name for name in looks if name not in allowed]
    told = "; ".join(f"{name}: {score(name):.3g}" for name in allowed)
    reason = f"ms of a step x squared noise of its gradient: {told}"
    return best, reason + (f"; barred for leak: {', '.join(barred)}" if barred else "")


class Chooser:
    """Chooses how a run draws, at fixed steps, from stored costs and keyed draws: never by the clock.

    Args:
        config: of the run, resolved, with `sampler.choose_every`.
        train: the training data.
        batch_size: examples of a batch.
        run_dir: gets `costs.json` and `choices.json`.

    Example:
        >>> from samplex_cuda.training import Trainer, config, Config
        >>> run = config.override(Config(), ["sampler.choose_every=500"])
        >>> Trainer(run, train, run_dir="runs/auto").fit()  # doctest: +SKIP
    """

    def __init__(self, config: Config, train: Dataset, batch_size: int, run_dir: Path) -> None:
        self.config, self.train, self.batch_size, self.run_dir = config, train, batch_size, run_dir
        self.batch = batch_size * (int(getattr(train, "window", 1)) if train.kind == "text" else 1)
        self.ways = [name for name in WAYS if name.split(",")[0] in config.sampler.candidates]
        self.present = self.ways[0]
        self.costs: dict[str, float] = {}
        self.look_ms = 0.0
        self.history: list[dict[str, Any]] = []
        self._configs: dict[str, Config] = {}

    # ------------------------------------------------------------------------------------------ state
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"present": self.present, "costs": self.costs, "look_ms": self.look_ms, "history": self.history}

    def restore(self, state: dict[str, Any], encoder: Encoder, head: SampledClassifier) -> None:
        """The state of a checkpoint; the head gets the sampler whose numbers the checkpoint will bring."""
        self.present, self.costs = str(state["present"]), {k: float(v) for k, v in state["costs"].items()}
        self.look_ms, self.history = float(state["look_ms"]), list(state["history"])
        if self.present not in self.ways:
            raise ValueError(f"chooser: present must be one of {self.ways}, got {self.present!r}")
        self._give(head, self._make(self.present, encoder, head, fit=False))

    def config_of(self, way: str) -> Config:
        """The configuration of a run that always draws so."""
        if way not in self._configs:
            settings = [*_ALIKE, *WAYS[way], "sampler.choose_every=0"]
            self._configs[way] = configs.override(self.config, settings).resolved()
        return self._configs[way]

    @property
    def every(self) -> int:
        """Steps between two choices, as asked for."""
        return int(self.config.sampler.choose_every)

    @property
    def seed(self) -> int:
        """Of the draws that are looked at."""
        return int(self.config.training.seed)

    @property
    def interval(self) -> int:
        """Steps between two choices: more than asked for where looking would take more than 2 % of the time."""
        least = min(self.costs.values())
        return max(self.every, math.ceil(self.look_ms / (_OVERHEAD * least)))

    # ------------------------------------------------------------------------------------------ steps
    def step(self, step: int, encoder: Encoder, head: SampledClassifier) -> str:
        """Before step `step`: measures at first, chooses when it is time; the reason of a choice, or nothing."""
        if not self.costs:
            self._first(encoder, head)
        if not step or step % self.interval or (self.history and self.history[-1]["step"] == step):
            return ""
        looks, made = self._look(step, encoder, head)
        way, reason = best_way(looks, self.costs, self.present)
        if way != self.present:
            self._give(head, made[way], way)
        self.present = way
        self.history.append({"step": step, "way": way, "reason": reason, "looks": looks})
        self._write("choices.json", self.history)
        return f"{way} ({reason})"

    def _write(self, name: str, what: Any) -> None:
        checkpoint.write_file(self.run_dir / name, json.dumps(what, indent=1))

    def _stored(self) -> Any:
        """Costs that an earlier start of this run has measured, or None."""
        path = self.run_dir / "costs.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def _first(self, encoder: Encoder, head: SampledClassifier) -> None:
        """Costs of a step of each way and of a look: of the run folder if they are there, else measured."""
        stored = self._stored()
        if stored is not None and set(stored["costs"]) == set(self.ways):
            self.costs, self.look_ms = stored["costs"], stored["look_ms"]
            return
        begin = time.perf_counter()
        _, made = self._look(0, encoder, head)
        self.look_ms = 1e3 * (time.perf_counter() - begin)
        h, target, seen, context = self._rows(encoder, head)
        place = torch.arange(min(self.batch, _TIMED_ROWS), device=h.device) % h.shape[0]
        h, target, seen = h[place], target[place], seen[place]
        context = None if context is None else context[place]
        costs: dict[str, float] = dict.fromkeys(self.ways, 0.0)
        jobs: list[timing.Job] = []
        for name in self.ways:
            jobs += self._jobs(name, made[name], head, h, target, seen, context, costs)
        timing.measure(jobs, h.device)
        self.costs = {name: round(ms, 6) for name, ms in costs.items()}
        self._write("costs.json", {"costs": self.costs, "look_ms": self.look_ms})

    def _jobs(
        self,
        name: str,
        sampler: samplers.Sampler,
        head: SampledClassifier,
        h: Tensor,
        target: Tensor,
        seen: Tensor,
        context: Tensor | None,
        costs: dict[str, float],
    ) -> list[timing.Job]:
        c = self.config_of(name).head
        m, shared, strata = int(c.num_samples), bool(c.shared), bool(c.stratified)
        draw = self._draw(sampler, seen, target, context, m, shared, strata)
        key = torch.tensor([7, 0], device=h.device)
        leaves = [t.detach().requires_grad_() for t in (h, head.weight, head.bias) if t is not None]

        def step() -> Any:
            drawn = draw(key)
            if shared and drawn.repeats():
                drawn = drawn.merged()
            loss = functional.sampled_softmax(
                leaves[0], leaves[1], target, drawn.ids, drawn.log_q, *leaves[2:], scale=head.scale, sparse=True
            )
            return torch.autograd.grad(loss, leaves)

        def add(median: float, _: float) -> None:
            costs[name] += median

        jobs = [timing.Job(step, add, max(1.0, self.batch / h.shape[0]))]
        if sampler.follows_rows:
            ids = torch.cat([draw(key).ids.reshape(-1), target]).unique()
            rows = head.weight.detach()[ids]
            extra = (head.bias.detach()[ids],) if sampler.has_bias and head.bias is not None else ()
            every = sampler.follow_interval(self.batch, m, shared)
            told: Any = sampler
            share = 1.0 if every == 1 else min(1.0, head.num_classes / (every * ids.shape[0]))
            jobs.append(timing.Job(lambda: told.update(ids, rows, *extra), add, share))
        return jobs

    @staticmethod
    def _draw(
        sampler: samplers.Sampler,
        seen: Tensor,
        target: Tensor,
        context: Tensor | None,
        m: int,
        shared: bool,
        strata: bool,
    ) -> Any:
        more: dict[str, Any] = {"stratified": True} if strata else {}
        if shared:
            return lambda key: sampler.sample(seen, m, shared=True, key=key, context=context, **more)
        return lambda key: sampler.sample(seen, m, exclude=target, key=key, context=context)

    def _rows(self, encoder: Encoder, head: SampledClassifier) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """h, first targets, what samplers look at, context: of rows of the first training batch, in evaluation."""
        h, y, _, context = some_rows(encoder, head, self.train, self.batch_size)
        n = min(h.shape[0], self._most_rows(head))
        several = y.reshape(y.shape[0], -1)
        first = (several >= 0).to(torch.int64).argmax(1, keepdim=True)
        h = h[:n].detach()
        return h, several.gather(1, first)[:n, 0], h, None if context is None else context[:n]

    @staticmethod
    def _most_rows(head: SampledClassifier) -> int:
        return max(_LEAST_ROWS, _NUMBERS // head.num_classes)

    def _make(self, way: str, encoder: Encoder, head: SampledClassifier, fit: bool) -> samplers.Sampler:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.training.seed)
            return make_sampler(self.config_of(way), self.train, encoder, head, fit).to(head.weight.device)

    def _look(
        self, step: int, encoder: Encoder, head: SampledClassifier
    ) -> tuple[dict[str, dict[str, float]], dict[str, samplers.Sampler]]:
        """Error and leak of all ways on some rows, and their samplers: that of the head as it is, the others new."""
        h, target, seen, context = self._rows(encoder, head)
        made: dict[str, samplers.Sampler] = {}
        known: dict[str, samplers.Sampler] = {self._sampler_key(self.present): head.sampler}
        looks: dict[str, dict[str, float]] = {}
        pair = torch.tensor([self.seed ^ 0xA070, step], device=h.device)
        for number, name in enumerate(self.ways):
            c, kind = self.config_of(name).head, self._sampler_key(name)
            if kind not in known:
                known[kind] = self._make(name, encoder, head, fit=True)
            made[name] = sampler = known[kind]
            m, shared = int(c.num_samples), bool(c.shared)
            draw = self._draw(sampler, seen, target, context, m, shared, bool(c.stratified))
            error, batch = gradient_noise(head, h, target, draw, m, self.batch, fold_in(pair, number + 1))
            leak = leaks(head, h, target[:, None], [(sampler, seen, shared, [m])], context)[0].mean()
            looks[name] = {"error": error, "batch": batch, "leak": float(leak)}
        return looks, made

    def _sampler_key(self, way: str) -> str:
        return json.dumps(dataclasses.asdict(self.config_of(way).sampler), sort_keys=True)

    def _give(self, head: SampledClassifier, sampler: samplers.Sampler, way: str | None = None) -> None:
        config = self.config_of(self.present if way is None else way)
        head.stratified = False
        head.shared = bool(config.head.shared)
        head.set_sampler(sampler, num_samples=int(config.head.num_samples), update=self._policy(config, head))
        head.follower.reset()
        head.stratified = bool(config.head.stratified)

    def _policy(self, config: Config, head: SampledClassifier) -> Any:
        """How a sampler of this configuration follows the table."""
        return models._policy(config, head.loss)
