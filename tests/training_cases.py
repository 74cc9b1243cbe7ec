"""Small data sets and configurations for the tests of `samplex_cuda.training`."""

from __future__ import annotations

import numpy as np
import torch

from samplex_cuda import data
from samplex_cuda.training import Config, config

C = 60


def dense(n=120, width=10, classes=C, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    centres = torch.randn(classes, width, generator=g)
    return data.Dense(centres[y] + 0.3 * torch.randn(n, width, generator=g), y, num_classes=classes)


def sparse(n=120, width=40, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, n)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    indices = np.concatenate([rng.choice(width, k, replace=False) for k in lengths])
    labels = rng.integers(1, 4, n)
    label_indptr = np.concatenate([[0], np.cumsum(labels)])
    ids = np.concatenate([rng.choice(C, k, replace=False) for k in labels])
    values = rng.random(len(indices)).astype(np.float32) + 0.1
    return data.Sparse(indptr, indices, values, label_indptr, ids, width, C)


def text(n=600, columns=4, window=5, seed=0):
    rng = np.random.default_rng(seed)
    steps = rng.integers(0, 7, n)
    return data.Tokens((np.cumsum(steps) % C).astype(np.int64), C, window=window, columns=columns)


def interactions(users=25, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 9, users)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return data.Interactions(indptr, rng.integers(0, C, int(lengths.sum())), num_items=C, history=4)


MAKE = {"dense": dense, "sparse": sparse, "text": text, "interactions": interactions}
# model -> kind of data, settings
MODELS = {
    "linear": ("dense", ["model.name=linear"]),
    "linear_pca": ("sparse", ["model.name=linear", "model.pca=8"]),
    "mlp": ("dense", ["model.name=mlp", "model.dropout=0.2"]),
    "embedding_bag": ("sparse", ["model.name=embedding_bag", "model.hidden=12"]),
    "lstm": ("text", ["model.name=lstm", "model.dropout=0.2", "model.layers=2"]),
    "lstm_tied": ("text", ["model.name=lstm", "model.tied=true", "model.hidden=12"]),
    "gru": ("text", ["model.name=gru"]),
    "gru_tied": ("text", ["model.name=gru", "model.tied=true"]),
    "two_tower": ("interactions", ["model.name=two_tower", "model.dropout=0.1"]),
    "two_tower_tied": ("interactions", ["model.name=two_tower", "model.tied=true"]),
    "sequence_gru": ("interactions", ["model.name=sequence", "model.pooling=gru"]),
    "sequence_gru_tied": ("interactions", ["model.name=sequence", "model.pooling=gru", "model.tied=true"]),
    "sequence_attention": ("interactions", ["model.name=sequence", "model.pooling=attention", "model.tied=true"]),
}
SAMPLERS = {
    "uniform": ["sampler.name=uniform"],
    "log_uniform": ["sampler.name=log_uniform"],
    "unigram": ["sampler.name=unigram", "sampler.smoothing=1"],
    "bigram": ["sampler.name=bigram", "sampler.smoothing=1"],
    "tree": ["sampler.name=tree", "sampler.dim=4", "sampler.base=none"],
    "tree_default": ["sampler.name=tree", "sampler.dim=4"],
    "quadratic": ["sampler.name=quadratic", "sampler.base=none"],
    "rff": ["sampler.name=rff", "sampler.num_features=64", "sampler.nu=1", "sampler.normalize=true",
            "sampler.kind=rff", "sampler.base=none"],
    "rff_default": ["sampler.name=rff", "sampler.num_features=64"],
    "midx": ["sampler.name=midx", "sampler.num_codes=8", "sampler.update=3"],
    "midx_default": ["sampler.name=midx"],
    "auto": [],
    "softmax": ["sampler.name=softmax"],
    "mixture": ["sampler.name=mixture", 'sampler.components=["quadratic", "uniform"]', "sampler.weights=[0.8, 0.2]"],
}  # fmt: skip


def case(model="linear", sampler="uniform", *settings):
    """(config, train, valid) of a small run: 16 rows per batch, 8 wide."""
    kind, options = MODELS[model]
    base = [
        "model.dim=8",
        "head.num_samples=6",
        "optimizer.encoder_lr=0.01",
        "training.batch_size=16",
        "training.epochs=2",
        "training.log_every=3",
        "training.checkpoint_every=4",
        "training.plot=false",
        "training.threads=1",
    ]
    run = config.override(Config(), [*base, *options, *SAMPLERS[sampler], *settings])
    train, valid = MAKE[kind](), MAKE[kind](seed=1)
    if run.data.negatives:  # rows of 1 to 3
        rows = torch.randint(C, (len(train), 3), generator=torch.Generator().manual_seed(2))
        rows[torch.arange(len(rows)) % 3 == 0, 1:] = -100
        train.set_negatives(rows)
    return run, train, valid
