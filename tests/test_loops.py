"""Plain loops with DDP and FSDP2 on real ranks, and torchmetrics over them."""

from __future__ import annotations

import loop_cases
import pytest
import torch

import samplex_cuda as sx


@pytest.mark.parametrize(("number", "kind"), [(2, "ddp"), (3, "fsdp2")])
def test_the_loops_of_the_page(ranks, number, kind):
    """As a person copies them; parameters end the same on all four ranks and have moved."""
    first, *others = ranks.run(4, "loop_cases:page", number)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b), kind
    torch.manual_seed(0)
    assert not torch.equal(first[0], torch.nn.Linear(16, 32).weight)
    assert all(bool(p.isfinite().all()) for p in first)


@pytest.mark.parametrize(("clip", "accumulate"), [(0.1, 1), (1e9, 1), (0.1, 2)])
def test_ddp_with_clipping_is_one_process(ranks, clip, accumulate):
    """Dense and row gradients of all ranks in one norm: the steps are those of one process with the whole batch."""
    alone = loop_cases.one_process(2, clip, accumulate)
    one, two = ranks.run(2, "loop_cases:ddp_loop", clip, accumulate)
    if clip < 1:
        assert float(alone["norms"].min()) > clip  # it does clip
    for name, want in alone.items():
        assert torch.equal(one[name], two[name]), name
        torch.testing.assert_close(one[name], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("embedding", ["own", "tied"])
@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (3, 2)])
def test_sparse_embeddings_are_those_of_one_process(ranks, world, accumulate, embedding):
    """Their row gradients are exchanged too, and joined with those of a head that has the same table."""
    alone = loop_cases.one_process(world, 0.1, accumulate, embedding)
    found = ranks.run(world, "loop_cases:ddp_loop", 0.1, accumulate, embedding)
    for name, want in alone.items():
        for other in found[1:]:
            assert torch.equal(found[0][name], other[name]), name
        torch.testing.assert_close(found[0][name], want, rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_replicated_model_is_plain(ranks):
    assert all(ranks.run(2, "loop_cases:copied"))


def test_a_table_shared_with_a_dense_layer_is_refused(ranks):
    for error, _ in ranks.outcomes(2, "loop_cases:shared_with_dense"):
        assert "must share a class table with nn.Embedding(sparse=True) only, got other (Linear)" in error


@pytest.mark.parametrize("with_nll", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_metric_over_ranks_with_uneven_batches(ranks, world, with_nll):
    pytest.importorskip("torchmetrics")
    found = ranks.run(world, "loop_cases:metric", with_nll)
    want = sx.metrics.Evaluator((1, 5))
    for rank in range(world):
        for ids, targets, nll in loop_cases.ranked(rank, world):
            want.update(*((ids, targets, nll) if with_nll else (ids, targets)))
    for of_rank in found:
        assert of_rank == pytest.approx(want.compute())
