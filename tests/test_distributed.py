"""Sharded heads on one to four gloo ranks: the same bits on any number of them, the same answers as one process."""

from __future__ import annotations

import pytest
import torch
from rank_cases import BATCH, CLASSES, DIM, HEADS, batches, extras, make_head, rows_optimizer, tables_of

import samplex_cuda as sx
from samplex_cuda.distributed import Layout

WORLDS = (1, 2, 3, 4)


# ------------------------------------------------------------------------------------------------ layout
@pytest.mark.parametrize("order", ["class", "spread"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("classes", [1, 2, 5, 6, 100, 1003])
def test_every_class_has_one_row(classes, world, order):
    layouts = [Layout(classes, world, rank, order) for rank in range(world)]
    ids = torch.arange(classes)
    local = torch.stack([layout.local(ids) for layout in layouts])
    assert ((local >= 0).sum(0) == 1).all()
    sizes = [len(part) for part in ids.chunk(world)]
    assert [layout.rows for layout in layouts] == sizes + [0] * (world - len(sizes))
    for layout in layouts:
        mine = layout.classes()
        assert torch.equal(layout.local(mine), torch.arange(layout.rows))
    outside = torch.tensor([-1, -100, classes, 2**40])
    assert (layouts[0].local(outside) == -1).all()


def test_spread_balances_frequent_classes():
    ids = sx.samplers.LogUniform(10**6).sample(None, 64, batch_size=1024, key=sx.Key(1)).ids
    loads = {
        order: [int((Layout(10**6, 4, rank, order).local(ids) >= 0).sum()) for rank in range(4)]
        for order in ("class", "spread")
    }
    assert max(loads["class"]) > 0.85 * ids.numel()
    assert max(loads["spread"]) <= 1.3 * ids.numel() / 4


# ------------------------------------------------------------------------------------------------ steps
CASES = {
    **{name: (name, {}) for name in HEADS if name != "augment and reduce"},
    "augment and reduce": ("augment and reduce", {"index": True}),
    "spread": ("plain", {"order": "spread"}),
    "sgd": ("plain", {"rule": "sgd"}),
    "stochastic rounding": ("bf16", {"rule": "rounded"}),
    "stochastic rounding unfused": ("bf16", {"rule": "rounded", "fused": False}),
    "unfused": ("plain", {"fused": False}),
    "unfused shared": ("shared", {"fused": False}),
    "several targets": ("plain", {"targets": 3}),
    "several targets nce": ("nce", {"targets": 3}),
    "positives": ("plain", {"positives": True}),
    "positives shared": ("shared", {"positives": True}),
    "weights": ("plain", {"weights": True}),
    "sphere spread unfused": ("sphere", {"order": "spread", "fused": False}),
    "sphere weights": ("arcface", {"weights": True, "targets": 3}),
    "sphere positives": ("sphere", {"positives": True}),
    "target weights": ("plain", {"target_weight": True, "targets": 3}),
    "target weights of one": ("arcface", {"target_weight": True, "weights": True}),
    "target and class weights": (
        "shared",
        {"target_weight": True, "targets": 3, "head": {"class_weight": torch.linspace(0.1, 2.0, CLASSES)}},
    ),
    "own negatives": ("plain", {"negatives": "draw"}),
    "own plain negatives": ("arcface", {"negatives": "plain", "targets": 3}),
    "own shared negatives": ("shared", {"negatives": "shared"}),
    "own ragged negatives": ("one-vs-each", {"negatives": "ragged"}),
    "class weights": ("smoothed", {"head": {"class_weight": torch.linspace(0.1, 2.0, CLASSES)}}),
    "hard": ("plain", {"hard": 3}),
    "hard shared": ("shared", {"hard": 3, "positives": True}),
    "hard sphere": ("arcface", {"hard": 2, "weights": True}),
    "hard uncorrected": ("cosface uncorrected", {"hard": 2}),
    "hard and own negatives": ("plain", {"hard": 2, "negatives": "ragged"}),
    "hard in a batch": ("mixed negatives", {"hard": 2, "fused": False}),
    "learned scale and weights": ("learned arcface", {"hard": 2, "weights": True, "positives": True}),
    "learned scale unfused": ("learned scale", {"fused": False, "order": "spread", "targets": 3}),
}


def by_row(found, step=None):
    """Gradients of h, or answers, of all ranks in the order of the batch."""
    made = torch.zeros(BATCH, DIM, dtype=torch.float64)
    for rank in found:
        rows, grad = rank["grads"][step]
        if grad is not None:
            made[rows] = grad.double()
    return made


@pytest.mark.parametrize("case", CASES)
def test_same_bits_on_any_number_of_ranks_and_as_one_process(ranks, case):
    name, options = CASES[case]
    of = {world: ranks.run(world, "train", name, options) for world in WORLDS}
    one = of[1][0]
    for world in WORLDS[1:]:
        for rank in of[world]:
            assert [a.item() for a in rank["losses"]] == [a.item() for a in one["losses"]]
            assert rank["scales"] == one["scales"]
            for mine, other in zip(rank["tables"] + rank["start"], one["tables"] + one["start"], strict=True):
                assert (mine is None) == (other is None)
                assert mine is None or torch.equal(mine, other)
            torch.testing.assert_close(rank["nll"], one["nll"], rtol=1e-5, atol=1e-6)
            logits, ids = rank["topk"]
            assert torch.equal(ids, one["topk"][1][rank["rows"]])
            torch.testing.assert_close(logits, one["topk"][0][rank["rows"]], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(rank["log_prob"], one["log_prob"][rank["rows"]], rtol=1e-5, atol=1e-5)
            assert rank["log_eta"] is None or torch.equal(rank["log_eta"], one["log_eta"])
        for step in range(4):
            close = 1e-2 if name == "bf16" else 1e-5
            torch.testing.assert_close(by_row(of[world], step), by_row(of[1], step), rtol=close, atol=close)
    compare_with_one_process(name, options, one)


def compare_with_one_process(name, options, one):
    """The same steps of an unsharded head."""
    head = make_head(name, **options.get("head", {}))
    with torch.no_grad():
        head.weight.copy_(one["start"][0])
        if head.bias is not None:
            head.bias.copy_(one["start"][1])
    optimizer = rows_optimizer(options, tables_of(head))
    of_scale = None if head.log_scale is None else torch.optim.SGD([head.log_scale], lr=0.3)
    head.fuse_optimizer(optimizer)
    key, everything = sx.Key(9), torch.arange(BATCH)
    close = {"bf16": 2e-2}.get(name, 1e-5)
    for step, (h, y) in enumerate(batches(4, options.get("targets", 0), head.weight.dtype)):
        h = h.requires_grad_()
        loss = head(h, y, key=key, **extras(options, everything))
        loss.backward()
        torch.testing.assert_close(loss.detach(), one["losses"][step], rtol=close, atol=close)
        torch.testing.assert_close(h.grad.double(), by_row([one], step), rtol=close, atol=close)
        if of_scale is not None:
            of_scale.step()
            of_scale.zero_grad()
            assert float(head.log_scale.detach()) == pytest.approx(one["scales"][step], abs=1e-5)
    if name != "bf16" and "tables" in one:
        for mine, other in zip(one["tables"], (head.weight, head.bias), strict=True):
            if other is not None:
                torch.testing.assert_close(mine, other.detach(), rtol=1e-4, atol=1e-5)
    if head.log_eta is not None:
        assert (head.log_eta != head.log_eta.max()).any()  # moved
        torch.testing.assert_close(head.log_eta, one["log_eta"], rtol=close, atol=close)
    head.eval()
    h, y = batches(1, options.get("targets", 0), head.weight.dtype)[0]
    torch.testing.assert_close(head(h, y), one["nll"], rtol=close, atol=close)
    logits, ids = head.topk(h, 7)
    torch.testing.assert_close(logits, one["topk"][0], rtol=close, atol=close)
    if name != "bf16":
        assert torch.equal(ids, one["topk"][1])
        torch.testing.assert_close(head.log_prob(h).gather(1, ids), one["log_prob"], rtol=close, atol=close)


FEW = {
    "plain": ({}, {}),
    "shared": ({"shared": True}, {"order": "spread"}),
    "unfused": ({"bias": False}, {"fused": False}),
    "hard": ({"shared": True}, {"hard": True}),
    "sphere": ({"normalize": True, "learn_scale": True, "scale": 5.0}, {}),
    "unique": ({"unique": True}, {}),
    "in batch": ({"shared": True}, {"in_batch": True}),
    "full": ({"loss": "full_softmax"}, {"fused": False}),
    "online": ({}, {"route": "online_softmax"}),
    "shared rows": ({"shared": True}, {"route": "shared_rows"}),
    "rows to queries": ({}, {"route": "rows_to_queries"}),
}


@pytest.mark.parametrize("case", FEW)
def test_a_rank_without_a_class_takes_part(ranks, case):
    ((losses, grads, weight, top, nll),) = ranks.run(1, "few_classes", *FEW[case])
    exact = FEW[case][1].get("route", "summed_logits") == "summed_logits" and case != "full"
    found = ranks.run(4, "few_classes", *FEW[case])
    for rank in found:
        assert rank[0] == found[0][0]
        assert torch.equal(rank[2], found[0][2])
        assert rank[0] == (losses if exact else pytest.approx(losses, rel=1e-5))
        assert torch.equal(rank[2], weight) if exact else torch.allclose(rank[2], weight, rtol=1e-5, atol=1e-5)
        assert torch.equal(rank[3], top)
        assert rank[4] == pytest.approx(nll, rel=1e-5)
        for (rows, grad), (_, want) in zip(rank[1], grads, strict=True):
            torch.testing.assert_close(grad, want[rows], rtol=1e-5, atol=1e-6)


def test_initial_rows_are_those_of_a_linear_layer(ranks):
    weight, bias = ranks.run(3, "train", "plain", {})[0]["start"]
    bound = DIM**-0.5
    for table in (weight, bias):
        assert table.abs().max() <= bound
        assert abs(float(table.double().mean())) < 5 * bound / (3 * table.numel()) ** 0.5
        assert abs(float(table.double().square().mean()) / (bound**2 / 3) - 1) < 0.2
    assert weight.unique().numel() > 0.99 * weight.numel()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_averaging_encoder_learns_as_one_process(ranks, kind):
    (alone,) = ranks.run(1, "with_encoder", "plain")
    for world in (2, 4):
        for rank in ranks.run(world, "with_encoder", kind):
            for mine, other in zip(rank, alone, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_accumulated_backwards_make_one_update(ranks):
    changed, tables = ranks.run(1, "accumulated")[0]
    assert changed == [False, True, False, True]
    for _, mine in ranks.run(3, "accumulated"):
        assert all(torch.equal(a, b) for a, b in zip(mine, tables, strict=True))


def test_a_loss_scale_is_taken_out_and_an_overflow_left_out(ranks):
    tables, scale = ranks.run(1, "loss_scaled")[0]
    assert scale == 512.0
    assert torch.equal(tables[1][0], tables[0][0])
    assert not torch.equal(tables[2][0], tables[1][0])
    for mine, other in ranks.run(4, "loss_scaled"):
        assert other == scale
        for (weight, bias), (want, of_bias) in zip(mine, tables, strict=True):
            assert torch.equal(weight, want)
            assert torch.equal(bias, of_bias)


def test_a_sharded_head_inside_ddp_raises(ranks):
    for message in ranks.run(1, "inside_ddp"):
        assert "must not be inside DistributedDataParallel" in message


# ------------------------------------------------------------------------------------------------ refusals
REFUSED = {
    "target": ("IndexError: SampledClassifier: y must be in [0, 203)", "rank 1 of the group rejected its batch"),
    "width": ("ValueError: SampledClassifier: h must be [*, 8]", "rank 1 of the group rejected its batch"),
    "capacity": ("batch_capacity = 12 rows, got 36", "rank 1 of the group rejected its batch"),
    "negatives": ("IndexError: SampledClassifier: negatives.ids must be in [0, 203), got 203", "rank 1 of the group"),
    "no negatives": ("RuntimeError: ", "must call the head in the same way"),
    "hard": ("IndexError: SampledClassifier: hard must be in [0, 203), got 206", "rank 1 of the group rejected"),
    "numbers of hard": ("RuntimeError: ", "must call the head in the same way"),
    "mode": ("RuntimeError: ", "must call the head in the same way"),
    "gradients": ("RuntimeError: ", "must call the head in the same way"),
    "targets": ("RuntimeError: ", "must call the head in the same way"),
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("what", REFUSED)
def test_a_batch_that_one_rank_refuses_stops_every_rank(ranks, what, warm):
    own, others = REFUSED[what]
    messages = ranks.run(3, "refuse", what, warm)
    assert own in messages[1]
    for message in (messages[0], messages[2]):
        assert others in message


def test_rows_travel_with_their_header_where_the_last_step_had_such_rows(ranks):
    """Three collectives instead of four: header and rows, logits, gradients of h; the numbers are the same."""
    for calls, same in ranks.run(3, "collectives"):
        assert calls == [4, 3, 4, 4, 3, 4, 3, 4, 3, 3]
        assert all(same)


def test_ranks_may_bring_different_numbers_of_negatives(ranks):
    """The loss of a row is that with its own negatives, however many those of other ranks are."""
    head, (h, y) = make_head("plain", reduction="none"), batches(1)[0]
    ids = torch.arange(BATCH * 8).view(BATCH, 8) % CLASSES
    for world in (2, 3):
        found = ranks.run(world, "uneven_negatives")
        with torch.no_grad():
            head.weight.copy_(found[0][1])
            head.bias.copy_(found[0][2])
        for rank, rows in enumerate(torch.arange(BATCH).tensor_split(world)):
            log_q = None if rank % 2 else torch.full((len(rows), rank + 1), -2.0)
            want = head(h[rows], y[rows], negatives=sx.Negatives(ids[rows, : rank + 1], log_q))
            assert bool(want.sum() > 0)
            for loss, *_ in found:
                torch.testing.assert_close(loss[rows], want.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("source", ["pool", "exact"])
@pytest.mark.parametrize("name", ["plain", "sphere"])
def test_hard_negatives_are_mined_in_all_shards(ranks, source, name):
    """The same as in one process: with the pool of the first rank, whatever generators the others have."""
    head, (h, y) = make_head(name), batches(1)[0]
    for world in (1, 3):
        found = ranks.run(world, "mined", source, name)
        with torch.no_grad():
            head.weight.copy_(found[0][2][0])
            if head.bias is not None:
                head.bias.copy_(found[0][2][1])
        want = sx.HardNegatives(head, 4, source, pool=50).mine(h, y, key=sx.Key(7))
        for rows, mined, _, fine, message in found:
            assert torch.equal(mined, want[rows])
            assert fine
            assert message.startswith("NotImplementedError: SampledClassifier.shard: a rank holds a part of the rows")


def test_heads_that_several_ranks_cannot_train():
    retired = sx.SampledClassifier(4, 50, sx.samplers.Unigram(torch.ones(50)), 3)
    left = torch.ones(50)
    left[7] = 0
    retired.retire_classes(torch.tensor([7]), sampler=sx.samplers.Unigram(left))
    words = "no class may be retired, got 1 of 50"
    with pytest.raises(ValueError, match=rf"SampledClassifier\.shard: {words}"):
        retired.shard(encoder="sum")
    with pytest.raises(ValueError, match=rf"sx\.distributed\.replicate: {words}"):
        sx.distributed.replicate(retired, encoder="sum")


def test_a_sampler_on_another_device(ranks):
    for message in ranks.run(2, "wrong_device"):
        assert message.startswith("ValueError: SampledClassifier.shard: sampler must be on cpu, as the rows, got ")


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="torchrun"):
        make_head("plain").shard(encoder="average")


def test_options_that_do_not_fit():
    with pytest.raises(ValueError, match="encoder must be one of average, sum"):
        make_head("plain").shard(encoder="both")
    with pytest.raises(ValueError, match="batch_capacity"):
        make_head("plain").shard(encoder="sum", batch_capacity=0)
    with pytest.raises(ValueError, match="order must be one of"):
        Layout(10, 2, 0, "random")
