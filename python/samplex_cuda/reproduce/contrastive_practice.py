"""What the correction is worth in practice: two towers trained with negatives from several sources, recall on held-out
pairs.

Two data sets. Gowalla: a table of users as queries, a table of places as the bank of keys. Built-in two views: an item
is seen through noise by the query encoder and clean by the key encoder; both are encoders of the paper. In both, items
differ much in how often they are somebody's positive, so that in-batch negatives are drawn by popularity.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from samplex_cuda import data, metrics, optim, samplers
from samplex_cuda.data import HierarchicalZipf
from samplex_cuda.functional import contrastive
from samplex_cuda.prediction import exact_topk
from samplex_cuda.reproduce.contrastive_model import Encoder
from samplex_cuda.rng import Key

__all__ = ["METHODS", "GowallaTask", "Outcome", "Task", "TwoViewTask", "compare"]

# Name -> where the negatives come from, and whether they are corrected by their log-probability.
METHODS: dict[str, tuple[str, bool]] = {
    "in-batch, without log Q": ("batch", False),
    "in-batch, with log Q": ("batch", True),
    "sampled by frequency, with log Q": ("unigram", True),
    "sampled uniformly, with log Q": ("uniform", True),
    "uniform subset, without log Q (Eq. 3.1)": ("subset", False),
}


@dataclasses.dataclass
class Outcome:
    """One method on one task.

    Attributes:
        rate: the learning rate that was best on validation.
        tried: recall on validation by rate.
        steps, seconds, recall: the curve on the test part; seconds of training alone.

    Example:
        >>> from samplex_cuda.reproduce.contrastive_practice import Outcome
        >>> Outcome(0.1, {0.1: 0.2}, [10], [1.5], [0.25]).recall[-1]
        0.25
    """

    rate: float
    tried: dict[float, float]
    steps: list[int]
    seconds: list[float]
    recall: list[float]


class Task:
    """A model with its data: what `compare` trains. Subclasses give `start`, `step`, `recall`.

    Example:
        >>> from samplex_cuda.reproduce.contrastive_practice import Task, TwoViewTask
        >>> issubclass(TwoViewTask, Task)
        True
    """

    rates: tuple[float, ...]

    def start(self, method: str, rate: float, seed: int, final: bool) -> None:
        """A fresh model; `final`: the run that is judged on the test part."""
        raise NotImplementedError

    def step(self) -> None:
        """One step."""
        raise NotImplementedError

    def recall(self, part: str) -> float:
        """recall@20 on "valid" or "test"."""
        raise NotImplementedError


def compare(
    task: Task, methods: list[str], *, tune: int, steps: list[int], seed: int, done: Callable[[int], None]
) -> dict[str, Outcome]:
    """Trains every method: the rate by validation after `tune` steps, then the curve at `steps` on the test part.

    Args:
        task: model and data.
        methods: of `METHODS`.
        tune: steps for each rate that is tried.
        steps: where the curve is measured, rising.
        seed: of models and order, the same for every method.
        done: called with a number of steps.

    Example:
        >>> from samplex_cuda.reproduce.contrastive_practice import TwoViewTask, compare
        >>> task = TwoViewTask(items=40, dim=4, batch=8, examples=64, held_out=32, width=8, samples=6)
        >>> found = compare(task, ["in-batch, with log Q"], tune=2, steps=[2, 4], seed=0, done=lambda n: None)
        >>> len(found["in-batch, with log Q"].recall)
        2
    """
    found = {}
    for method in methods:
        tried = {}
        for rate in task.rates:
            task.start(method, rate, seed, final=False)
            for _ in range(tune):
                task.step()
            done(tune)
            tried[rate] = task.recall("valid")
        rate = max(tried, key=lambda one: tried[one])
        task.start(method, rate, seed, final=True)
        outcome = Outcome(rate, tried, [], [], [])
        seconds, at = 0.0, 0
        for until in steps:
            began = time.perf_counter()
            for _ in range(until - at):
                task.step()
            seconds += time.perf_counter() - began
            done(until - at)
            at = until
            outcome.steps.append(at)
            outcome.seconds.append(seconds)
            outcome.recall.append(task.recall("test"))
        found[method] = outcome
    return found


# ------------------------------------------------------------------------------------------------ Gowalla
def _find(folder: Path, part: str) -> Path:
    found = sorted(p for p in folder.iterdir() if part in p.name and p.is_file())
    if not found:
        raise ValueError(f"reproduce: gowalla must have a file with {part!r} in its name, got none in {folder}")
    return found[0]


def _pairs(whole: data.Interactions) -> tuple[Tensor, Tensor]:
    users = np.repeat(np.arange(whole.num_users), np.diff(np.asarray(whole.indptr)))
    return torch.from_numpy(users), torch.from_numpy(np.asarray(whole.items).astype(np.int64))


def _rows_of(users: Tensor, items: Tensor, wanted: Tensor, fill: int) -> Tensor:
    """[len(wanted), most] items of the wanted users (ascending), padded with `fill`."""
    place = torch.searchsorted(wanted, users)
    inside = wanted[place.clamp(max=len(wanted) - 1)] == users
    place, items = place[inside], items[inside]
    order = place.argsort(stable=True)
    place, items = place[order], items[order]
    counts = torch.bincount(place, minlength=len(wanted))
    column = torch.arange(len(place)) - (counts.cumsum(0) - counts)[place]
    rows = torch.full((len(wanted), int(counts.max())), fill)
    rows[place, column] = items
    return rows


class GowallaTask(Task):
    """Users and places of Gowalla (LightGCN's split), an embedding each, Adagrad on the touched rows.

    Args:
        folder: with a train and a test file, lines `user item item ...`.
        dim: d.
        batch: B.
        samples: k, draws for each query.
        users: so many users are judged, the same for all methods; None: all.
        seed: of the validation split and of the judged users.

    Example:
        >>> from samplex_cuda.reproduce.contrastive_practice import GowallaTask
        >>> GowallaTask("data/gowalla")  # doctest: +SKIP
    """

    rates = (0.05, 0.1)

    def __init__(
        self,
        folder: Path | str,
        *,
        dim: int = 64,
        batch: int = 1024,
        samples: int = 64,
        users: int | None = None,
        seed: int = 0,
    ) -> None:
        folder = Path(folder)
        train = data.interactions_file(_find(folder, "train"), order="none")
        test = data.interactions_file(_find(folder, "test"), order="none", num_items=train.num_classes)
        self.num_users, self.num_items = max(train.num_users, test.num_users), train.num_classes
        whole = _pairs(train)
        generator = torch.Generator().manual_seed(seed)
        held = torch.rand(len(whole[0]), generator=generator) < 0.1
        left = whole[0][~held], whole[1][~held]
        self.pairs = {False: left, True: whole}  # by `final`
        self.asked: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        for part, known, asked in (
            ("valid", left, (whole[0][held], whole[1][held])),
            ("test", whole, _pairs(test)),
        ):
            some = asked[0].unique()
            if users is not None and len(some) > users:
                some = some[torch.randperm(len(some), generator=generator)[:users]].sort().values
            self.asked[part] = (some, _rows_of(*known, some, self.num_items), _rows_of(*asked, some, -100))
        self.dim, self.batch, self.samples = dim, batch, samples

    def start(self, method: str, rate: float, seed: int, final: bool) -> None:
        """Fresh tables."""
        generator = torch.Generator().manual_seed(seed)
        self.tables = [
            torch.nn.Parameter(torch.randn(rows, self.dim, generator=generator) * 0.1)
            for rows in (self.num_users, self.num_items)
        ]
        self.optimizer = optim.RowAdagrad(self.tables, lr=rate)
        self.source, self.corrected = METHODS[method]
        self.users, self.items = self.pairs[final]
        # The distribution of a positive; + 1: a place of the test part may be new.
        self.unigram = samplers.Unigram(torch.bincount(self.items, minlength=self.num_items).double() + 1)
        self.uniform = samplers.Uniform(self.num_items)
        self.log_q = self.unigram.log_prob_all()[0]
        self.order, self.at, self.generator = torch.empty(0, dtype=torch.int64), 0, generator
        self.key = Key(seed)

    def step(self) -> None:
        """One batch of (user, place)."""
        if self.at + self.batch > len(self.order):
            self.order, self.at = torch.randperm(len(self.users), generator=self.generator), 0
        rows = self.order[self.at : self.at + self.batch]
        self.at += self.batch
        users, items = self.users[rows], self.items[rows]
        table, bank = self.tables
        queries = nnf.embedding(users, table, sparse=True)
        if self.source == "batch":
            keys = nnf.embedding(items, bank, sparse=True)
            loss = contrastive(queries, keys, log_q=self.log_q[items] if self.corrected else None, key_ids=items)
        elif self.source == "subset":
            loss = contrastive(queries, bank, items, num_negatives=self.samples, key=self.key)
        else:
            law = self.unigram if self.source == "unigram" else self.uniform
            loss = contrastive(queries, bank, items, num_negatives=self.samples, sampler=law, key=self.key)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def recall(self, part: str) -> float:
        """recall@20 of the judged users; what they have in training is left out of their ranking."""
        users, known, asked = self.asked[part]
        table, bank = self.tables
        hits, block = 0.0, 1024
        for begin in range(0, len(users), block):
            some = slice(begin, begin + block)
            scores = torch.empty(len(users[some]), self.num_items + 1)
            torch.mm(table[users[some]], bank.T, out=scores[:, :-1])
            scores.scatter_(1, known[some], -math.inf)  # padding goes to the last column
            top = scores[:, :-1].topk(20).indices
            hits += metrics.recall_at_k(top, asked[some], 20) * len(top)
        return hits / len(users)


# ------------------------------------------------------------------------------------------------ two views
class TwoViewTask(Task):
    """Built-in data: query view = an item's features with noise, key view = its features; both through encoders.

    Items have Zipf frequencies and lie in a hierarchy (`HierarchicalZipf`). Encoders are the paper's, in float32, with
    Adam. Sampled negatives are drawn once for the batch and encoded with its positives, each item once.

    Args:
        items: n.
        dim: width of the features.
        batch: B.
        examples: pairs of an epoch.
        held_out: pairs for validation, and as many for the test.
        width: m of the encoders.
        samples: k, shared by the batch.
        noise: of the query view.

    Example:
        >>> from samplex_cuda.reproduce.contrastive_practice import TwoViewTask
        >>> TwoViewTask(items=50, dim=4, batch=8, examples=64, held_out=16, width=8, samples=6).num_items
        50
    """

    rates = (1e-3, 3e-3)

    def __init__(
        self,
        *,
        items: int = 10_000,
        dim: int = 64,
        batch: int = 256,
        examples: int = 400_000,
        held_out: int = 5_000,
        width: int = 256,
        samples: int = 255,
        noise: float = 3.0,
        seed: int = 0,
    ) -> None:
        self.data = HierarchicalZipf(items, dim, examples, seed=seed, num_valid=2 * held_out, noise=noise)
        self.num_items, self.dim, self.width, self.batch, self.samples = items, dim, width, batch, samples
        x, y = self.data.split("valid")
        self.parts = {"valid": (x[:held_out], y[:held_out]), "test": (x[held_out:], y[held_out:])}
        self.features = self.data.centres(torch.arange(items))
        self.unigram = samplers.Unigram(self.data.class_counts)
        self.uniform = samplers.Uniform(items)
        self.log_q = self.unigram.log_prob_all()[0]

    def start(self, method: str, rate: float, seed: int, final: bool) -> None:
        """Fresh encoders."""
        generator = torch.Generator().manual_seed(seed)
        self.encoders = [Encoder(self.dim, self.width, self.dim, 1, generator, torch.float32) for _ in range(2)]
        parameters = [w for encoder in self.encoders for w in encoder.parameters()]
        self.optimizer: Any = torch.optim.Adam(parameters, lr=rate)
        self.source, self.corrected = METHODS[method]
        self.stream = self.data.batches("train", self.batch, epochs=None, drop_last=True)
        self.key = Key(seed)

    def step(self) -> None:
        """One batch of pairs."""
        x, y = next(self.stream)
        query, key = self.encoders
        if self.source == "batch":
            loss = contrastive(
                query(x), key(self.features[y]), log_q=self.log_q[y] if self.corrected else None, key_ids=y
            )
        else:
            if self.source == "subset":
                ids = self.uniform.subset(self.samples, batch_size=1, key=self.key).ids[0]
                log_q = None
            else:
                law = self.unigram if self.source == "unigram" else self.uniform
                ids, log_q, _ = law.sample(None, self.samples, shared=True, key=self.key)
            used, place = torch.cat([y, ids]).unique(return_inverse=True)
            loss = contrastive(query(x), key(self.features[used]), place[: len(y)], place[len(y) :], log_q)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def recall(self, part: str) -> float:
        """recall@20 among all items."""
        x, y = self.parts[part]
        query, key = self.encoders
        top = exact_topk(query(x), key(self.features), min(20, self.num_items))[1]
        return metrics.recall_at_k(top, y, top.shape[1])
