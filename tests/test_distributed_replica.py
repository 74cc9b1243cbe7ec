"""Plain heads under DistributedDataParallel: tables with the same bits on every rank, and those of one process."""

from __future__ import annotations

import pytest
import replica_cases
import torch
from rank_cases import BATCH, CLASSES, extras, rows_optimizer, tables_of

import samplex_cuda as sx

CASES = {
    "plain": ("plain", {}),
    "sgd": ("plain", {"rule": "sgd"}),
    "sgd shared": ("shared", {"rule": "sgd"}),
    "unfused": ("plain", {"fused": False}),
    "no bias": ("no bias", {}),
    "shared": ("shared", {}),
    "unfused shared": ("shared", {"fused": False}),
    "smoothed": ("smoothed", {}),
    "scaled sum": ("scaled sum", {}),
    "negative sampling": ("negative sampling", {}),
    "nce": ("nce", {}),
    "one-vs-each": ("one-vs-each", {}),
    "augment and reduce": ("augment and reduce", {"index": True}),
    "bf16": ("bf16", {}),
    "fp64": ("fp64", {}),
    "tree": ("tree", {}),
    "several targets": ("plain", {"targets": 3}),
    "positives": ("plain", {"positives": True}),
    "weights": ("plain", {"weights": True}),
    "sphere": ("sphere", {}),
    "sphere unfused": ("sphere shared", {"fused": False}),
    "arcface": ("arcface", {"weights": True, "targets": 3}),
    "cosface uncorrected": ("cosface uncorrected", {}),
    "target weights": ("plain", {"target_weight": True, "targets": 3}),
    "own negatives": ("shared", {"negatives": "draw"}),
    "own shared negatives": ("plain", {"negatives": "shared"}),
    "own ragged negatives": ("plain", {"negatives": "ragged", "fused": False}),
    "class weights": ("smoothed", {"head": {"class_weight": torch.linspace(0.1, 2.0, CLASSES)}}),
    "learned scale": ("learned scale", {"targets": 3}),
    "learned arcface": ("learned arcface", {"weights": True, "hard": 2}),
    "unique": ("unique", {}),
    "unique shared": ("unique shared", {"fused": False}),
    "hard": ("plain", {"hard": 3}),
    "hard shared": ("shared", {"hard": 2, "positives": True}),
    "hard and own negatives": ("plain", {"hard": 2, "negatives": "ragged"}),
    "in batch": ("in batch", {}),
    "in batch without bias": ("in batch", {"head": {"bias": False}, "fused": False}),
    "mixed negatives": ("mixed negatives", {"fused": False}),
    "mixed and hard negatives": ("mixed negatives", {"hard": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_tables_and_those_of_one_process(ranks, case):
    name, options = CASES[case]
    for world in (1, 3) if case != "plain" else (1, 2, 3, 4):
        found = ranks.run(world, "replica_cases:train", name, options)
        for rank in found[1:]:
            for key, value in found[0]["end"].items():
                assert torch.equal(rank["end"][key], value), key
            assert [loss.item() for loss in rank["losses"]] == [loss.item() for loss in found[0]["losses"]]
        compare_with_one_process(name, options, found[0])


def compare_with_one_process(name, options, found):
    """The same steps in one process, which has all rows and makes the same draws."""
    model = replica_cases.Model(name, {**options, "head": {**options.get("head", {}), "reduction": "sum"}})
    model.load_state_dict(found["start"])
    head = model.head
    of_rows = rows_optimizer(options, tables_of(head))
    optimizer = torch.optim.SGD(replica_cases.besides_rows(model), lr=0.1)
    close = {"bf16": 3e-2}.get(name, 1e-5)
    mean = name != "scaled sum"
    for step, (x, y) in enumerate(replica_cases.inputs(options, head.weight.dtype)):
        pair = torch.tensor([9, step])
        weight = (y != -100).any(1) if y.dim() == 2 else y != -100
        weight = weight.to(head._wide())
        if head.class_weight is not None:
            weight = weight * head.class_weight[y.clamp(min=0)]
        if "sample_weight" in (given := extras(options, torch.arange(BATCH))):
            weight = weight * given["sample_weight"]
        total = model(x, y, key=pair, **extras(options, torch.arange(BATCH)))
        loss = total / weight.sum() if mean else total
        optimizer.zero_grad(), of_rows.zero_grad()
        loss.backward()
        optimizer.step(), of_rows.step()
        torch.testing.assert_close(found["losses"][step], loss.detach(), rtol=close, atol=close)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(found["end"][key], value, rtol=close, atol=close, msg=key)


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_those_of_the_model(ranks, world):
    model = (world - 1) * 32 * (4 * 64 + 12 * 41)
    for sent in ranks.run(world, "replica_cases:sent", False):
        assert sent == pytest.approx(model, rel=0.05)


def test_gradients_of_shared_draws_are_summed(ranks):
    model = (4 - 1) * 32 * (4 * 64 + 12) + 8 * 40 * 65 * (4 - 1) // 4
    for sent in ranks.run(4, "replica_cases:sent", True):
        assert sent == pytest.approx(model, rel=0.05)


def test_a_copy_is_a_plain_head(ranks):
    assert ranks.run(2, "replica_cases:copied") == [True, True]


REFUSED = {
    "inside": ["RuntimeError: sx.distributed.replicate: DistributedDataParallel must ignore head.weight"] * 2,
    "batch": ["rank 1 of the group rejected its batch", "IndexError: SampledClassifier: y must be in [0, 203)"],
    "rounding": ["replicate: an optimizer with stochastic_rounding=True must have a key"] * 2,
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(ranks, what):
    for message, wanted in zip(ranks.run(2, "replica_cases:refuse", what), REFUSED[what], strict=True):
        assert wanted in message


def in_batch(**options):
    return sx.SampledClassifier(4, 50, sx.samplers.InBatch(50, **options), 3, shared=True)


def test_heads_that_do_not_fit():
    replicate = sx.distributed.replicate
    sampler = sx.samplers.Uniform(50)
    for head, text in (
        (torch.nn.Linear(2, 2), "module must hold a SampledClassifier"),
        (sx.SampledClassifier(4, 50, loss="full_softmax"), "loss must sample classes"),
        (sx.SampledClassifier(4, 50, sampler, 3, reduction="none"), 'reduction must be "mean" or "sum"'),
        (sx.SampledClassifier(4, 50, sampler, 3, device="meta"), "on the meta device"),
        (sx.SampledClassifier(4, 50, sampler, 3, sparse=False), "sparse=True or a fused optimizer"),
        (in_batch(group="a group"), "InBatch sampler must have group=None, .* got a process group"),
        (in_batch(extra=sx.samplers.Quadratic(torch.randn(50, 4))), "one distribution for all rows, got extra=Quad"),
    ):
        with pytest.raises(ValueError, match=text):
            replicate(head, encoder="average")
    with pytest.raises(ValueError, match="encoder must be one of average, sum"):
        replicate(sx.SampledClassifier(4, 50, sampler, 3), encoder="none")
    with pytest.raises(RuntimeError, match="torchrun"):
        replicate(sx.SampledClassifier(4, 50, sampler, 3), encoder="average")
