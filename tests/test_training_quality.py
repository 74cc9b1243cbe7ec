"""The quality guard: every built-in task, every sampler with its default settings, learns; in seconds.

The exact NLL, over all classes, must end below log C and below where it began. A sampler whose default configuration
trains a useless model fails here, however well its sampled loss falls.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from samplex_cuda import data
from samplex_cuda.training import Config, Trainer, config, evaluate
from samplex_cuda.training.config.checks import MODELS, SAMPLERS

C = 300


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def zipf(count, rng):
    """Class ids by Zipf's law, in an order that has nothing to do with the ids."""
    chances = 1 / np.arange(1, C + 1)
    return np.random.default_rng(7).permutation(C)[rng.choice(C, count, p=chances / chances.sum())]


def dense(seed):
    rng = np.random.default_rng(seed)
    y = zipf(1500, rng)
    centres = np.random.default_rng(1).standard_normal((C, 12))
    x = centres[y] + 0.5 * rng.standard_normal((len(y), 12))
    return data.Dense(torch.from_numpy(x).float(), torch.from_numpy(y), num_classes=C)


def sparse(seed):
    """Rows of three features of their label and two others."""
    rng = np.random.default_rng(seed)
    y = zipf(1500, rng)
    indices = np.stack([(y * k + 11 * k) % 200 for k in (1, 3, 7)] + [rng.integers(0, 200, len(y)) for _ in "ab"], 1)
    indices = np.array([np.unique(np.r_[row, [200 + i for i in range(5)]])[:5] for row in indices])
    indptr = np.arange(0, indices.size + 1, 5)
    return data.Sparse(indptr, indices.reshape(-1), None, None, y, 210, C)


def text(seed):
    """A word says much about the next one."""
    rng = np.random.default_rng(seed)
    tokens = zipf(3600, rng)
    tokens[1::2] = (tokens[::2] * 7 + 3) % C
    return data.Tokens(tokens, C, window=10, columns=8)


def interactions(seed):
    """Users who go on where they are."""
    rng = np.random.default_rng(seed)
    starts = zipf(200, rng)
    items = np.concatenate([(start + np.arange(8) * rng.integers(1, 3)) % C for start in starts])
    return data.Interactions(np.arange(0, len(items) + 1, 8), items, num_items=C, history=5)


TASKS = {
    "linear": (dense, []),
    "mlp": (dense, ["model.hidden=32"]),
    "embedding_bag": (sparse, []),
    "lstm": (text, []),
    "gru": (text, []),
    "two_tower": (interactions, []),
    "sequence": (interactions, ["model.pooling=gru"]),
}
# What a sampler needs to be given; the rest is its default.
NEEDS = {
    "mixture": ['sampler.components=["tree", "unigram"]', "sampler.weights=[0.5, 0.5]"],
    "rff": ["sampler.num_features=128"],
}
CASES = [(model, name) for model in TASKS for name in ("auto", *SAMPLERS)
         if name != "bigram" or TASKS[model][0] in (text, interactions)]  # fmt: skip


def test_every_built_in_model_is_a_task():
    assert set(TASKS) == set(MODELS)


@pytest.mark.filterwarnings("ignore:log_uniform. class ids must be sorted")  # they are not, on purpose
@pytest.mark.parametrize(("model", "sampler"), CASES, ids=[f"{m}-{s}" for m, s in CASES])
def test_the_exact_loss_falls_below_log_c(tmp_path, model, sampler):
    make, settings = TASKS[model]
    train, valid = make(0), make(1)
    settings = [
        f"model.name={model}", "model.dim=16", f"sampler.name={sampler}", *NEEDS.get(sampler, []), *settings,
        "training.batch_size=64", "training.epochs=4", "optimizer.lr=0.2", "optimizer.encoder_lr=0.01",
        "training.keep_best=false", "training.plot=false", "training.threads=1", 'training.metrics=["nll"]',
    ]  # fmt: skip
    found: list[str] = []

    def on_event(event):
        if event["event"] == "warning":
            found.append(event["message"])

    trainer = Trainer(config.override(Config(), settings), train, valid, tmp_path / "run", on_event=on_event)
    start = evaluate(trainer.encoder, trainer.head, valid, metrics=["nll"])["nll"]
    end = trainer.fit().metrics["nll"]
    assert end < math.log(C), (end, found)
    assert end < start - 0.3, (start, end, found)


def test_the_guard_sees_a_useless_configuration(tmp_path):
    """A tree alone on text, which is not the default: the reason for this file."""
    settings = ["model.name=lstm", "model.dim=16", "sampler.name=tree", "sampler.base=none", "training.batch_size=64",
                "training.epochs=10", "optimizer.lr=0.2", "optimizer.encoder_lr=0.01", "training.threads=1",
                "training.plot=false", 'training.metrics=["nll"]']  # fmt: skip
    trainer = Trainer(config.override(Config(), settings), text(0), text(1), tmp_path / "run", on_event=lambda e: None)
    assert trainer.fit().metrics["nll"] > math.log(C)
