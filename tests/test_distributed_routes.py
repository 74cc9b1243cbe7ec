"""The routes of a sharded step: the numbers of one process, the bytes of the model, and which route is taken."""

from __future__ import annotations

import pytest
import torch
from rank_cases import CLASSES
from test_distributed import by_row, compare_with_one_process

import samplex_cuda as sx
from samplex_cuda.distributed.routes import ROUTES, Sizes, bytes_sent, resolve_route

ONLINE = {
    "plain": ("plain", {}),
    "unfused": ("plain", {"fused": False}),
    "spread": ("plain", {"order": "spread"}),
    "no bias": ("no bias", {}),
    "shared": ("shared", {}),
    "absolute": ("absolute", {}),
    "scaled sum": ("scaled sum", {}),
    "bf16": ("bf16", {}),
    "fp64": ("fp64", {}),
    "tree": ("tree", {}),
    "several targets": ("plain", {"targets": 3}),
    "weights": ("plain", {"weights": True}),
    "class weights": ("plain", {"head": {"class_weight": torch.linspace(0.1, 2.0, CLASSES)}}),
    "class weights and targets": ("plain", {"head": {"class_weight": torch.linspace(0.1, 2.0, CLASSES)}, "targets": 3}),
}


@pytest.mark.parametrize("case", ONLINE)
def test_online_softmax_is_that_of_one_process(ranks, case):
    name, options = ONLINE[case]
    for world in (1, 2, 3, 4) if case == "plain" else (1, 3):
        check(ranks.run(world, "train", name, {**options, "route": "online_softmax"}), name, options)


def check(found, name, options):
    """Every rank has the same loss; all of it is what one process has."""
    for rank in found[1:]:
        assert [a.item() for a in rank["losses"]] == [a.item() for a in found[0]["losses"]]
    whole = {**found[0], "grads": []}
    for step in range(4):
        whole["grads"].append((torch.arange(by_row(found, step).shape[0]), by_row(found, step)))
    rows = [rank["rows"] for rank in found]
    for answer in ("topk", "log_prob"):
        parts = [rank[answer] for rank in found]
        whole[answer] = join(parts, rows) if answer == "log_prob" else tuple(
            join([part[i] for part in parts], rows) for i in range(2)
        )  # fmt: skip
    compare_with_one_process(name, options, whole)


def join(parts, rows):
    made = torch.empty(sum(map(len, rows)), *parts[0].shape[1:], dtype=parts[0].dtype)
    for part, own in zip(parts, rows, strict=True):
        made[own] = part
    return made


# ------------------------------------------------------------------------------------------------ bytes
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("route", ["summed_logits", "online_softmax"])
def test_bytes_of_the_queries_are_those_of_the_model(ranks, route, world):
    for sent, _ in ranks.run(world, "route_cases:sent", route, False, 5000, 64, 100, 32):
        assert sent == pytest.approx(bytes_sent(route, Sizes(world, 32, 100, 64)), rel=0.05)


# ------------------------------------------------------------------------------------------------ the choice
def head_of(draws=6, dim=8, **options):
    return sx.SampledClassifier(dim, 100, sx.samplers.Uniform(100), draws, **options)


def test_auto_takes_what_sends_least():
    assert resolve_route("auto", head_of(), 4, 32) == "summed_logits"
    assert resolve_route("auto", head_of(draws=9), 4, 32) == "online_softmax"
    assert resolve_route("auto", head_of(draws=9), 1, 32) == "summed_logits"
    smoothed = head_of(draws=9, loss=sx.losses.SampledSoftmax(label_smoothing=0.1))
    assert resolve_route("auto", smoothed, 4, 32) == "summed_logits"
    assert resolve_route("auto", head_of(draws=9, loss="nce"), 4, 32) == "summed_logits"


def test_a_route_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="loss must be SampledSoftmax without label smoothing, got NCE"):
        resolve_route("online_softmax", head_of(loss="nce"), 4, 32)
    with pytest.raises(ValueError, match="route must be one of auto, summed_logits"):
        resolve_route("shortest", head_of(), 4, 32)
    assert set(ROUTES) >= {"summed_logits", "online_softmax"}


def test_known_positives_need_the_reference(ranks):
    positives = (torch.arange(13), torch.arange(12))
    for message in ranks.run(2, "route_cases:message", {"route": "online_softmax"}, {"positives": positives}):
        assert 'positives must be None with route="online_softmax"' in message
