"""Ranks that differ: in their settings, in their generators, and by a batch that one of them refuses."""

from __future__ import annotations

import pytest
import torch
from rank_cases import BATCH, CLASSES

import samplex_cuda as sx
from samplex_cuda.distributed.settings import digest, settings_of


def run(ranks, world, name, *args):
    return ranks.run(world, f"rank_settings_cases:{name}", *args)


# ------------------------------------------------------------------------------------------------ settings
OF_HEAD = {
    "in_features": ({}, {"in_features": 9}),
    "num_classes": ({}, {"num_classes": CLASSES + 1}),
    "num_samples": ({}, {"num_samples": 7}),
    "shared": ({}, {"shared": True}),
    "stratified": ({"sampler": "codes", "shared": True}, {"sampler": "codes", "shared": True, "stratified": True}),
    "unique": ({}, {"unique": True}),
    "loss": ({}, {"loss": "one_vs_each"}),
    "loss ": ({"loss": sx.losses.SampledSoftmax(label_smoothing=0.1)}, {}),  # an option
    "loss  ": (
        {"loss": sx.losses.SampledSoftmax(margin=sx.losses.ArcFace(0.5)), "normalize": True},
        {"loss": sx.losses.SampledSoftmax(margin=sx.losses.ArcFace(0.4)), "normalize": True},
    ),
    "bias": ({}, {"bias": False}),
    "scale": ({}, {"scale": 2.0}),
    "normalize": ({"bias": False}, {"normalize": True}),
    "learn_scale": ({"bias": False}, {"learn_scale": True}),
    "class_weight": ({"class_weight": torch.ones(CLASSES)}, {"class_weight": torch.linspace(0.5, 1.5, CLASSES)}),
    "ignore_index": ({}, {"ignore_index": -1}),
    "sparse": ({}, {"sparse": False}),
    "reduction": ({}, {"reduction": "sum"}),
    "sampler_update": ({"sampler": "codes", "sampler_update": 2}, {"sampler": "codes", "sampler_update": 3}),
    "dtype": ({}, {"dtype": torch.float64}),
    "sampler": ({}, {"sampler": "uniform"}),
    "sampler ": ({"sampler": "codes"}, {"sampler": "more codes"}),  # a size
    "device of the rows": ({}, {"device": "meta"}),
}
OF_CALL = {
    "encoder": ({}, {"encoder": "average"}),
    "batch_capacity": ({}, {"batch_capacity": BATCH}),
    "order": ({}, {"order": "spread"}),
    "route": ({}, {"route": "online_softmax"}),
    "shard(sampler)": ({}, {"sampler": "replicate"}),
}


def names(message, field):
    """Whether a message names the field, and the ranks on both sides."""
    return (
        f"all ranks must have the same configuration, got {field.strip()} = " in message
        and " on ranks 0, 2 and " in message
        and message.endswith(" on rank 1")
    )


@pytest.mark.parametrize("field", [*OF_HEAD, *OF_CALL])
def test_ranks_that_shard_other_heads_all_stop_at_the_start(ranks, field):
    where, of = ("head", OF_HEAD) if field in OF_HEAD else ("call", OF_CALL)
    for message in run(ranks, 3, "differ", where, *of[field]):
        assert message.startswith("ValueError: SampledClassifier.shard: ")
        assert names(message, field), message


@pytest.mark.parametrize("field", [*OF_HEAD, "encoder", "batch_capacity"])
def test_ranks_that_replicate_other_heads_all_stop_at_the_start(ranks, field):
    where, of = ("head", OF_HEAD) if field in OF_HEAD else ("call", OF_CALL)
    for message in run(ranks, 3, "differ_replicated", where, *of[field]):
        assert message.startswith("ValueError: sx.distributed.replicate: ")
        assert names(message, field), message


@pytest.mark.parametrize("how", ["shard", "replicate"])
def test_what_one_rank_refuses_at_the_start_all_hear(ranks, how):
    op = "SampledClassifier.shard" if how == "shard" else "sx.distributed.replicate"
    own = f"ValueError: {op}: no class may be retired, got 1 of {CLASSES}: train this head in one process"
    found = run(ranks, 3, "one_refuses", how)
    assert found[1] == own
    for message in (found[0], found[2]):
        assert message == f"RuntimeError: {op}: rank 1 of the group must not refuse its configuration, got {own}"


CHANGED = {
    "num_samples": 7, "shared": True, "loss": "one_vs_each", "scale": 2.0, "unique": True, "reduction": "sum",
    "sampler": sx.samplers.Uniform(CLASSES),
}  # fmt: skip


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("how", ["shard", "replicate"])
def test_a_setting_that_one_rank_changes_stops_all(ranks, how, name, fixed):
    op = "SampledClassifier.shard" if how == "shard" else "sx.distributed.replicate"
    for first, then in run(ranks, 3, "change", how, name, CHANGED[name], fixed):
        assert first.startswith(f"ValueError: {op}: ")
        assert names(first, name), first
        assert then == "no error"  # once all ranks have changed it


def test_a_digest_depends_on_every_setting():
    found = settings_of(sx.SampledClassifier(4, 50, sx.samplers.Uniform(50), 5))
    digests = {digest(found)} | {digest({**found, name: "other"}) for name in found}
    assert len(digests) == len(found) + 1
    assert digest(found) == digest(dict(reversed(found.items())))


# ------------------------------------------------------------------------------------------------ keys
@pytest.mark.parametrize("how", ["shard", "replicate"])
def test_only_the_generator_of_the_first_rank_moves(ranks, how):
    found = run(ranks, 3, "generators", how)
    # Made, called with key=None, called with a key. A head with numbers needs no key when it is replicated.
    assert found[0][0] == [how == "shard", True, False]
    assert [moved for moved, _ in found[1:]] == [[False, False, False]] * 2
    assert all(torch.equal(loss, found[0][1]) for _, loss in found)


# ------------------------------------------------------------------------------------------------ refusals
LOST = {
    "summed logits": ("plain", {}),
    "shared": ("shared", {}),
    "unfused": ("plain", {"fused": False}),
    "weights": ("plain", {"weights": True}),
    "hard": ("plain", {"hard": True}),
    "own negatives": ("plain", {"negatives": True}),
    "augment and reduce": ("augment and reduce", {"index": True}),
    "sphere": ("sphere", {}),
    "online softmax": ("plain", {"route": "online_softmax"}),
    "rows to queries": ("plain", {"route": "rows_to_queries"}),
    "shared rows": ("shared", {"route": "shared_rows"}),
    "replicated": ("plain", {"replicate": True}),
    "replicated, shared": ("shared", {"replicate": True}),
    "replicated, augment and reduce": ("augment and reduce", {"replicate": True, "index": True}),
}


KINDS = [(case, "capacity") for case in LOST] + [
    (case, what) for case in ("summed logits", "replicated") for what in ("width", "type")
]


@pytest.mark.parametrize(("case", "what"), KINDS)
def test_a_batch_refused_where_nobody_looks_is_a_lost_step(ranks, case, what):
    """The rank that refuses goes through the step without a row; the others get a nan and no update."""
    name, options = LOST[case]
    found = run(ranks, 3, "refuse", name, options, what)
    for rank, one in enumerate(found):
        message, same = one["lost"]
        assert all(same)
        if rank == 1:
            words = {"capacity": "at most batch_capacity = 12 rows, got 36", "width": "h must be [*, 8]"}
            assert words.get(what, "y must be [4] or [4, P] int64") in message
            assert len(one["losses"]) == 2
            assert one["losses"] == [found[0]["losses"][0], found[0]["losses"][2]]
        else:
            assert message == "no error"
            assert str(one["losses"][1]) == "nan"
            assert one["grad"].eq(0).all()
        assert all(loss == loss for loss in (one["losses"][0], one["losses"][-1]))
    # The step after it is an ordinary one.
    usual = run(ranks, 3, "refuse", name, options, "none")
    assert not all(usual[0]["lost"][1])
    assert usual[0]["losses"][0] == found[0]["losses"][0]


@pytest.mark.parametrize(
    ("route", "name"),
    [("summed_logits", "plain"), ("online_softmax", "plain"), ("rows_to_queries", "plain"), ("shared_rows", "shared")],
)
def test_a_backward_that_one_rank_skips_stops_nobody(ranks, route, name):
    """Everything is exchanged in forward: the rank's own rows miss an update, and that is all."""
    found = run(ranks, 3, "skipped", route, name)
    for rank, (losses, changed) in enumerate(found):
        assert losses == found[0][0]
        assert changed == [True, rank != 1, True, True]
