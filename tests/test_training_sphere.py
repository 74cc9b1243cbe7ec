"""`[head] normalize` and margins from a configuration."""

from __future__ import annotations

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import data
from samplex_cuda.training import Config, config
from samplex_cuda.training.models import build


def made(*changes):
    return config.override(Config(), list(changes))


def test_a_head_on_the_sphere_is_built():
    train = data.Dense(torch.randn(60, 6), torch.randint(0, 9, (60,)))
    chosen = made("head.normalize=true", "head.margin_m2=0.5", "head.scale=16", "head.corrected=false")
    encoder, head = build(chosen, train)
    assert head.normalize
    assert head.bias is None
    assert head.loss == sx.losses.SampledSoftmax(margin=sx.losses.ArcFace(0.5), corrected=False)
    batch = train.batch(torch.arange(4))
    h, features = encoder.encode(batch)
    assert head(h, batch["y"], features=features).isfinite()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["head.margin_m2=0.5"], "margin_m2 must be 0 unless normalize = true"),
        (["head.normalize=true", "head.loss=nce"], "normalize must be false"),
        (["head.normalize=true", "head.margin_m2=2"], "margin_m2 must be a number at least 0 and at most 1.5"),
        (["head.loss=nce", "head.corrected=false"], "corrected must be true"),
    ],
)
def test_what_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        made(*changes).check()
