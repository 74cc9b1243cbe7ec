"""Ranks with fewer batches than others, and groups whose backend does not serve the class rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import samplex_cuda as sx
from samplex_cuda.distributed.collectives import check_backend


# Ranks in the last list have batches without a length.
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("counts", "unsized"), [([0, 5], []), ([5, 3, 0], []), ([5, 3, 0], [0, 1, 2]), ([0, 3, 5], [1])]
)
def test_losses_of_one_process_with_all_rows(ranks, counts, unsized, kind):
    [alone] = ranks.run(1, "even_cases:train", counts, kind, unsized, True)
    found = ranks.run(len(counts), "even_cases:train", counts, kind, unsized, False)
    assert len(alone["losses"]) == max(counts)
    for rank, count in zip(found, counts, strict=True):
        assert rank["losses"] == found[0]["losses"]
        torch.testing.assert_close(rank["losses"], alone["losses"], rtol=1e-5, atol=1e-5)
        assert [n > 0 for n in rank["rows"]] == [step < count for step in range(max(counts))]
        for mine, first, whole in zip(rank["end"], found[0]["end"], alone["end"], strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("unsized", "calls"), [([], 1), ([1], 1 + 5 + 1)])
def test_ranks_agree_once_where_lengths_are_known(ranks, unsized, calls):
    for rank, (seen, counted, message) in enumerate(ranks.run(3, "even_cases:walk", [5, 3, 0], unsized)):
        own = [5, 3, 0][rank]
        assert seen == [f"{rank}.{step}" for step in range(own)] + ["empty"] * (5 - own)
        assert (counted, message) == (calls, "no error")


def test_no_batch_on_any_rank(ranks):
    for unsized in ([], [0, 1]):
        assert [seen for seen, _, _ in ranks.run(2, "even_cases:walk", [0, 0], unsized)] == [[], []]


def test_more_batches_than_the_length_says(ranks):
    found = ranks.run(2, "even_cases:walk", [3, 2], [], 0)
    assert [len(seen) for seen, _, _ in found] == [3, 3]  # both end, nobody waits
    assert "batches must yield at most len(batches) = 3 batches, got more" in found[0][2]
    assert found[1][2] == "no error"


def test_even_batches_needs_a_group_and_an_iterable():
    with pytest.raises(RuntimeError, match=r"^sx\.distributed\.even_batches: torch\.distributed must be initialized"):
        sx.distributed.even_batches([], None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match="batches must be iterable, got int"):
            sx.distributed.even_batches(3, None)
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ backends
@pytest.mark.parametrize(
    ("what", "reported", "words"),
    [
        ("cpu rows", "cuda:nccl", "class rows on cpu (gloo), got cuda:nccl; make the group with"),
        ("cuda rows", "cpu:gloo,cuda:gloo", "class rows on cuda (nccl), got cpu:gloo,cuda:gloo; make the group with"),
        ("cuda rows", "cpu:gloo", "class rows on cuda (nccl), got cpu:gloo; make the group with"),
        ("replicate", "cuda:nccl", "class rows on cpu (gloo), got cuda:nccl; make the group with"),
    ],
)
def test_a_group_of_another_backend_is_refused_on_every_rank(ranks, what, reported, words):
    name = "sx.distributed.replicate" if what == "replicate" else "SampledClassifier.shard"
    for message in ranks.run(3, "even_cases:other_backend", what, reported):
        assert message.startswith(f"ValueError: {name}: group must have a backend for ")
        assert words in message


@pytest.mark.parametrize("reported", ["cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl", "cpu:mpi,cuda:mpi"])
@pytest.mark.parametrize("what", ["cpu rows", "replicate"])
def test_groups_that_serve_the_cpu(ranks, what, reported):
    assert ranks.run(2, "even_cases:other_backend", what, reported) == ["no error"] * 2


@pytest.mark.parametrize("reported", ["cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:fake,cuda:fake"])
def test_groups_that_serve_cuda(monkeypatch, reported):
    monkeypatch.setattr(dist, "get_backend_config", lambda _: reported)
    check_backend("op", None, torch.device("cuda", 0))


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", None])
def test_what_torch_reports_of_gloo(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_backend("op", dist.group.WORLD, torch.device("cpu"))
        with pytest.raises(ValueError, match="op: group must have a backend for class rows on cuda"):
            check_backend("op", dist.group.WORLD, torch.device("cuda"))
    finally:
        dist.destroy_process_group()
