"""Samplers that are spread over the ranks: the same draws on any number of them, the distribution of one process."""

from __future__ import annotations

import pytest
import torch
from rank_cases import batches
from rank_sampler_cases import KERNELS, excluded, make_head, make_sampler, queries, table

import samplex_cuda as sx
from samplex_cuda.distributed import Layout
from samplex_cuda.distributed.exact import exact_log, tree_exp
from samplex_cuda.distributed.heap import Heap
from samplex_cuda.reference import kernel_tree as reference

WORLDS = (1, 2, 3, 4)
# Numbers of classes, ranks without a class among them, with leaves that two or three ranks share.
SIZES = (1, 2, 5, 37, 203)
FIELDS = ("ids", "log_q", "all", "again", "left", "shared again")


def run(ranks, world, name, *args):
    return ranks.run(world, f"rank_sampler_cases:{name}", *args)


def in_slots(kind, classes, order):
    """The unsharded sampler with its rows in the order of slots, and the class of each slot."""
    by_slot = Layout(classes, 1, 0, order).classes()
    weight, bias = table(classes)
    return KERNELS[kind](weight[by_slot], bias[by_slot]), by_slot


def distribution(sampler, by_slot, h, without):
    """log q_tree by slot in float64, and the excluded slots of each row."""
    query, phi = sampler._query(h)
    law = reference.tree_law(query, phi, sampler.rows, sampler.sums, *sampler._law()[:3])
    slot = {int(c): s for s, c in enumerate(by_slot)}
    rows = None if without is None else without.reshape(h.shape[0], -1).tolist()
    return law, None if rows is None else [sorted({slot[c] for c in row if c >= 0}) for row in rows]


def check_scores(found, wanted, left):
    """Scores of a draw on one rank against exact probabilities by class, [B, C]."""
    torch.testing.assert_close(found["all"].exp().double(), wanted, rtol=1e-3, atol=2e-6)
    torch.testing.assert_close(found["left"].exp().double(), left, rtol=1e-3, atol=2e-6)
    torch.testing.assert_close(found["log_q"], left.log().gather(1, found["ids"]).float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(found["log_q"], found["again"])
    shared, log_q = found["shared"]
    torch.testing.assert_close(log_q, wanted.mean(0).log()[shared].float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(log_q, found["shared again"])
    ids, _, scores = found["scored"]
    target = torch.arange(ids.shape[0]) % wanted.shape[1]
    torch.testing.assert_close(scores, wanted.log().gather(1, target[:, None])[:, 0].float(), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ kernel trees
@pytest.mark.parametrize("without", ["none", "one", "several"])
@pytest.mark.parametrize("order", ["class", "spread"])
@pytest.mark.parametrize("kind", ["quadratic", "quadratic mixed", "rff", "positive"])
def test_a_kernel_tree_draws_what_one_process_draws_up_to_rounding(ranks, kind, order, without):
    classes, h = 203, queries()
    sampler, by_slot = in_slots(kind, classes, order)
    law, slots = distribution(sampler, by_slot, h, excluded(without, classes, 10))
    drawn = reference.sample(3, 4, law, sampler.leaf_size, sampler.epsilon, 20, slots, band=1e-5)
    assert (drawn < 0).float().mean() < 0.02
    wanted, left = torch.empty_like(law), torch.empty_like(law)
    wanted[:, by_slot] = reference.conditional(law, sampler.epsilon).exp()
    left[:, by_slot] = reference.conditional(law, sampler.epsilon, slots).exp()
    for world in WORLDS:
        found = run(ranks, world, "draws", kind, classes, order, without)
        for rank in found:
            ids = rank["ids"]
            assert torch.equal(ids[drawn >= 0], by_slot[drawn.clamp_min(0)][drawn >= 0])
            for field in FIELDS:
                assert torch.equal(rank[field], found[0][field])
        check_scores(found[0], wanted, left)


@pytest.mark.parametrize("classes", SIZES)
@pytest.mark.parametrize("kind", ["quadratic bias", "orf normalized", "positive"])
def test_kernel_trees_of_few_classes(ranks, kind, classes):
    h, out = queries(), excluded("several", classes, 10)
    sampler, _ = in_slots(kind, classes, "class")
    want = sampler.sample(h, 20, key=torch.tensor([3, 4]), exclude=out)
    for world in (2, 4):
        for rank in run(ranks, world, "draws", kind, classes, "class", "several"):
            same = rank["ids"] == want.ids
            assert same.float().mean() > 0.99
            torch.testing.assert_close(rank["log_q"][same], want.log_q[same], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(rank["all"], sampler.log_prob_all(h), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                rank["left"], sampler.log_prob(h, torch.arange(classes).expand(10, -1), exclude=out), rtol=1e-4,
                atol=1e-4,
            )  # fmt: skip


def test_draws_of_a_kernel_tree_have_the_distribution_they_report(ranks):
    """20,000 draws of each row on three ranks, with excluded classes, against the exact probabilities."""
    classes, count = 37, 20_000
    found = run(ranks, 3, "draws", "rff", classes, "spread", "several", count)[1]
    p = found["left"].double().exp()
    torch.testing.assert_close(p.sum(1), torch.ones(10).double(), rtol=1e-5, atol=1e-5)
    hits = torch.zeros(10, classes).double().scatter_add_(1, found["ids"], torch.ones_like(found["ids"]).double())
    assert (hits[p == 0] == 0).all()
    expected = (p * count).clamp_min(1e-300)
    chi = torch.where(p > 0, (hits - p * count).square() / expected, 0.0).sum(1)
    freedom = (p > 0).sum(1).double() - 1
    assert ((chi - freedom) / (2 * freedom).sqrt()).abs().max() < 5


# ------------------------------------------------------------------------------------------------ unigram
@pytest.mark.parametrize("without", ["none", "one", "several"])
@pytest.mark.parametrize(
    ("classes", "order"), [(1, "class"), (2, "class"), (5, "spread"), (37, "class"), (203, "spread")]
)
@pytest.mark.parametrize("kind", ["unigram", "tree", "tree with base"])
def test_static_and_tree_draws_are_the_same_bits_on_any_number_of_ranks(ranks, kind, classes, order, without):
    of = {world: run(ranks, world, "draws", kind, classes, order, without) for world in WORLDS}
    one = of[1][0]
    for world in WORLDS:
        for rank in of[world]:
            for field in FIELDS:
                assert torch.equal(rank[field], one[field]), field
            for a, b in zip(rank["shared"] + rank["scored"], one["shared"] + one["scored"], strict=True):
                assert torch.equal(a, b)
    sampler, out = make_sampler(kind, classes), excluded(without, classes, 10)
    h = queries()
    given = torch.arange(classes).expand(10, -1)
    all_p, left = sampler.log_prob(h, given), sampler.log_prob(h, given, exclude=out)
    check_scores(one, all_p.double().exp(), left.double().exp())
    assert ((one["ids"] >= 0) & (one["ids"] < classes)).all()
    if kind == "tree":  # the bits of the replicated tree
        draw = sampler.sample(h, 20, key=torch.tensor([3, 4]), exclude=out)
        assert torch.equal(one["ids"], draw.ids)
        assert torch.equal(one["log_q"], draw.log_q)
        assert torch.equal(one["all"], all_p)
        assert torch.equal(one["left"], left)


@pytest.mark.parametrize("order", ["class", "spread"])
@pytest.mark.parametrize("kind", ["integers", "fractions"])
def test_frequencies_that_no_rank_holds_as_a_whole(ranks, kind, order):
    """Each rank asks only for the counts of the classes it holds; draws have the same bits on any number of ranks."""
    counts = make_sampler("unigram", 203).prefix.diff()
    wanted = sx.samplers.Unigram((counts >> 12).double() if kind == "integers" else counts.double())
    (one,) = run(ranks, 1, "deferred", kind, order)
    torch.testing.assert_close(one["all"][0].exp(), wanted.log_prob_all()[0].exp(), rtol=1e-5, atol=1e-9)
    for world in WORLDS[1:]:
        for rank in run(ranks, world, "deferred", kind, order):
            assert rank["loss"] == one["loss"]
            for field in ("ids", "log_q", "all"):
                assert torch.equal(rank[field], one[field])


WRONG_COUNTS = {
    "negative": ("unigram: counts must be finite and not negative, got 1 that are not, 0 of them on this rank",
                 "got 1 that are not, 1 of them on this rank"),
    "zero": ("unigram: counts must have a positive sum, got all zero",) * 2,
    "shape": ("unigram: counts must give [68] numbers, got [69] float32",) * 2,
    "replicate": ("a deferred Unigram must be sharded and without unique draws",) * 2,
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_COUNTS)
def test_counts_that_cannot_be_stop_every_rank(ranks, what):
    others, own = WRONG_COUNTS[what]
    for rank, message in enumerate(run(ranks, 3, "wrong_counts", what)[:2]):
        assert (own if rank == 1 else others) in message


def test_a_deferred_unigram_does_not_draw_by_itself():
    sampler = sx.samplers.Unigram.deferred(10, lambda ids: ids + 1)
    with pytest.raises(RuntimeError, match="unigram: a deferred sampler must be sharded with its head"):
        sampler.sample(None, 3, batch_size=2)
    with pytest.raises(TypeError, match="unigram: counts must be a function of class ids, got list"):
        sx.samplers.Unigram.deferred(10, [1.0] * 10)


def test_draws_of_a_sharded_unigram_have_its_distribution(ranks):
    classes, count = 37, 20_000
    found = run(ranks, 4, "draws", "unigram", classes, "class", "several", count)[2]
    p = found["left"].double().exp()
    hits = torch.zeros(10, classes).double().scatter_add_(1, found["ids"], torch.ones_like(found["ids"]).double())
    assert (hits[p == 0] == 0).all()
    chi = torch.where(p > 0, (hits - p * count).square() / (p * count).clamp_min(1e-300), 0.0).sum(1)
    freedom = (p > 0).sum(1).double() - 1
    assert ((chi - freedom) / (2 * freedom).sqrt()).abs().max() < 5


# ------------------------------------------------------------------------------------------------ heads
CASES = {
    "step": ("rff", {}),
    "bias": ("quadratic bias", {}),
    "spread": ("quadratic", {"order": "spread"}),
    "meta": ("quadratic", {"meta": True}),
    "meta frequencies": ("rff", {"meta": True}),
    "every second": ("positive", {"head": {"sampler_update": 2}}),
    "epoch": ("quadratic", {"head": {"sampler_update": "epoch"}}),
    "never": ("quadratic", {"head": {"sampler_update": None}}),
    "accumulated": ("quadratic", {"accumulate": 2}),
    "shared": ("quadratic", {"head": {"shared": True}}),
    "nce": ("quadratic", {"head": {"loss": "nce"}}),
    "negative sampling": ("quadratic", {"head": {"loss": "negative_sampling"}}),
    "normalized": ("orf normalized", {}),
    "codes": ("midx", {"head": {"sampler_update": "step"}}),
    "codes meta": ("midx", {"meta": True, "head": {"sampler_update": 2}}),
    "codes spread": ("midx product", {"order": "spread", "head": {"sampler_update": "step"}}),
    "codes with bias": ("midx product", {"even": True}),
    "codes accumulated": ("midx", {"accumulate": 2, "head": {"sampler_update": "step"}}),
    "codes stratified": ("midx", {"head": {"shared": True, "stratified": True}}),
    "codes negative sampling": ("midx", {"head": {"loss": "negative_sampling"}}),
    "in batch": ("in batch", {"head": {"shared": True}}),
}


@pytest.mark.filterwarnings("ignore:random_fourier")  # 64 features are few: estimates below zero
@pytest.mark.parametrize("case", CASES)
def test_a_sampler_follows_a_sharded_table(ranks, case):
    kind, options = CASES[case]
    of = {world: run(ranks, world, "follow", kind, 203, options) for world in WORLDS}
    one = of[1][0]
    for world in WORLDS:
        for rank in of[world]:
            assert rank["losses"] == pytest.approx(one["losses"], rel=1e-4)
            if "accumulate" not in options:  # of a late update a rank records its own rows alone
                assert rank["lag"] == one["lag"]
            assert rank["losses"] == of[world][0]["losses"]
            for field in ("before", "after"):
                assert torch.equal(rank[field], of[world][0][field])
                torch.testing.assert_close(rank[field], one[field], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(rank["nll"], one["nll"], rtol=1e-4, atol=1e-4)
    if options.get("order", "class") == "class" and not options.get("meta"):
        as_one_process(kind, options, one)


@pytest.mark.parametrize("order", ["class", "spread"])
def test_codes_are_made_again_from_all_shards(ranks, order):
    """20 classes are touched 4 times each in a few steps; cells and codes are then those of one process."""
    options = {"order": order, "head": {"sampler_update": "step"}, "steps": 9, "accumulate": 2}
    head = make_head("midx", 20, False, sampler_update="step")
    start = head.sampler.codes.clone()
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.2), accumulate=2)
    key = sx.Key(9)
    for h, y in batches(9):
        head(h, torch.where(y < 0, y, y % 20), key=key).backward()
    head.update_sampler()
    assert not torch.allclose(head.sampler.codes, start, atol=1e-2)
    for world in WORLDS:
        for rank in run(ranks, world, "follow", "midx", 20, options):
            torch.testing.assert_close(rank["codes"], head.sampler.codes, rtol=1e-4, atol=1e-5)
            assert torch.equal(rank["cell"], head.sampler.cell)


def test_how_often_codes_follow_depends_on_the_batch_of_all_ranks(ranks):
    of = {world: run(ranks, world, "follow", "midx", 203, {"even": True}) for world in (1, 2, 4)}
    for found in of.values():
        assert {rank["every"] for rank in found} == {of[1][0]["every"]}
    assert isinstance(of[1][0]["every"], int)


@pytest.mark.parametrize("kind", ["midx", "midx product"])
@pytest.mark.parametrize("order", ["class", "spread"])
def test_codes_draw_as_in_one_process(ranks, kind, order):
    sampler, h = make_sampler(kind, 203), queries()
    draw = sampler.sample(h, 20, key=torch.tensor([3, 4]), exclude=excluded("several", 203, 10))
    shared = sampler.sample(h, 20, shared=True, key=torch.tensor([5, 6]), stratified=True)
    for world in WORLDS:
        for found in run(ranks, world, "coded_draws", kind, order):
            assert torch.equal(found["ids"], draw.ids)
            assert torch.equal(found["log_q"], draw.log_q)
            assert torch.equal(found["shared"], shared.ids)
            assert torch.equal(found["shared_q"], shared.log_q)


def as_one_process(kind, options, one):
    head = make_head(kind, 203, False, **options.get("head", {}))
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.2), accumulate=options.get("accumulate", 1))
    key = sx.Key(9)
    for step, (h, y) in enumerate(batches(5)):
        loss = head(h, y, key=key)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(one["losses"][step], rel=1e-4)
        assert head.staleness().rows == one["lag"][step]
    torch.testing.assert_close(one["before"], head.sampler.log_prob_all(queries()), rtol=1e-3, atol=1e-3)
    head.update_sampler()
    torch.testing.assert_close(one["after"], head.sampler.log_prob_all(queries()), rtol=1e-3, atol=1e-3)
    head.eval()
    h, y = batches(1)[0]
    torch.testing.assert_close(one["nll"], head(h, y), rtol=1e-4, atol=1e-4)


FIXED = {
    "unigram": ("unigram", {}),
    "unigram shared": ("unigram", {"head": {"shared": True}}),
    "unigram negative sampling": ("unigram", {"head": {"loss": "negative_sampling"}}),
    "tree": ("tree", {}),
    "tree nce": ("tree", {"head": {"loss": "nce"}, "order": "spread"}),
    "tree with base": ("tree with base", {"order": "spread"}),
}


@pytest.mark.parametrize("case", FIXED)
def test_a_head_with_a_sharded_fixed_sampler(ranks, case):
    kind, options = FIXED[case]
    options = {**options, "sampler": "shard"}
    (one,) = run(ranks, 1, "follow", kind, 203, options)
    for world in WORLDS[1:]:
        for rank in run(ranks, world, "follow", kind, 203, options):
            assert rank["losses"] == one["losses"]
            torch.testing.assert_close(rank["nll"], one["nll"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["quadratic", "midx"])
def test_ranks_without_a_class_follow_too(ranks, kind):
    (one,) = run(ranks, 1, "follow", kind, 5, {})
    for rank in run(ranks, 4, "follow", kind, 5, {}):
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-4)


def test_another_sampler_is_spread_too(ranks):
    wanted = make_sampler("quadratic", 203).log_prob_all(queries())
    for found in run(ranks, 3, "another_sampler"):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_parts_of_other_samplers_are_spread_where_that_is_asked_for(ranks):
    """`sampler="shard"` reaches the tree and the frequencies inside a tree with a base, a mixture, in-batch draws."""
    wanted = {
        "tree with base": ["ShardedMixture", "ShardedTree", "ShardedUnigram"],
        "mixture": ["ShardedMixture", "ShardedUnigram", "Uniform"],
        "in batch with frequencies": ["ShardedInBatch", "ShardedUnigram", "StreamingFrequency"],
    }
    for found in run(ranks, 2, "kinds_of_parts"):
        assert found == wanted


# ------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize("kind", ["quadratic", "midx"])
@pytest.mark.parametrize("what", ["nan", "nan row", "alone"])
def test_a_table_that_one_rank_breaks_stops_every_rank(ranks, what, kind):
    found = run(ranks, 3, "refuse", what, kind)
    for rank, (message, works) in enumerate(found):
        assert works
        if what != "alone":
            assert f"{kind}: class rows must be finite" in message
            assert ("1 of them on this rank" if rank == 1 else "none of them on this rank") in message
        else:
            assert "must call the head in the same way" in message


def test_samplers_that_cannot_be_spread():
    with pytest.raises(ValueError, match='sampler="shard" requires'):
        shard_alone(sx.samplers.LogUniform(20), sampler="shard")
    with pytest.raises(ValueError, match="Unigram without unique draws"):
        shard_alone(sx.samplers.Unigram(torch.ones(20)), sampler="shard", unique=True)
    with pytest.raises(ValueError, match="group must be None in an InBatch sampler of a head on several ranks"):
        shard_alone(sx.samplers.InBatch(20, group="a group"), shared=True)
    with pytest.raises(ValueError, match="weight must be that of the head with copy=False, got another tensor"):
        shard_alone(sx.samplers.Softmax(torch.randn(20, 8), copy=False))
    with pytest.raises(ValueError, match="sampler must be one of auto, replicate, shard"):
        shard_alone(sx.samplers.LogUniform(20), sampler="both")
    head = shard_alone(sx.samplers.Quadratic(torch.randn(20, 8)))
    for source in ("tree", "index"):
        with pytest.raises(ValueError, match='source must be "pool", "exact" or a function with a sharded head'):
            sx.HardNegatives(head, 3, source)
    with pytest.raises(TypeError, match="exclude must be an int64 tensor"):
        head.sampler.sample(torch.randn(1, 8), 2, exclude=(torch.tensor([0, 1]), torch.tensor([3])))


def shard_alone(of_head, **options):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        of_plain = {name: options.pop(name) for name in ("shared", "unique") if name in options}
        return sx.SampledClassifier(8, 20, of_head, 5, **of_plain).shard(encoder="sum", **options)
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ checkpoints
SAVED = {
    "step": ("rff", {}),
    "spread": ("quadratic", {"order": "spread"}),
    "every third": ("quadratic", {"head": {"sampler_update": 4}}),
    "unigram": ("unigram", {}),
    "tree": ("tree", {"order": "spread"}),
    "tree with base": ("tree with base", {}),
    "codes": ("midx product", {"order": "spread", "head": {"sampler_update": 4}}),
    "in batch": ("in batch", {"head": {"shared": True}}),
}


@pytest.mark.parametrize("case", SAVED)
def test_saved_on_four_ranks_and_resumed_on_fewer(ranks, tmp_path, case):
    kind, options = SAVED[case]
    folder = str(tmp_path / "step_3")
    law, losses = run(ranks, 4, "save", kind, folder, options)[0]
    for world in (4, 2, 1):
        for found, resumed in run(ranks, world, "resume", kind, folder, options):
            torch.testing.assert_close(found, law, rtol=1e-4, atol=1e-4)
            assert resumed == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("kind", ["quadratic", "positive", "unigram", "tree", "tree with base", "midx", "midx product"])
def test_state_of_plain_and_sharded_heads(ranks, kind):
    assert all(run(ranks, 3, "through_plain", kind, "class"))
    if kind != "positive":  # whose estimates depend on the order of the rows
        assert all(run(ranks, 2, "through_plain", kind, "spread"))


# ------------------------------------------------------------------------------------------------ parts
@pytest.mark.parametrize("leaf", [1, 3, 8])
@pytest.mark.parametrize("world", [1, 3, 4, 7])
@pytest.mark.parametrize("classes", [1, 5, 64, 203])
def test_every_node_is_on_its_rank_or_on_all(classes, world, leaf):
    heaps = [Heap(Layout(classes, world, rank), leaf, torch.device("cpu")) for rank in range(world)]
    depth = heaps[0].depth
    for level in range(depth):
        nodes = torch.arange(1 << level)
        real = nodes * heaps[0].span(level) < classes
        rows = torch.stack([heap.children(level, nodes)[0] >= 0 for heap in heaps])
        common = heaps[0].children(level, nodes)[1]
        assert (rows.sum(0)[real & ~common] == 1).all()
        assert rows[:, common].all()
    most = 2 * (-(-classes // world) // leaf + 1) + 4 * depth + 2
    assert max(heap.size for heap in heaps) <= most + 2 * (world - 1) * depth + 1


def test_logarithm_and_exponential_have_the_bits_of_the_kernels():
    """Through samplers of one node and one alias table, which return them."""
    x = torch.randn(4000, 1) * 30
    tree = sx.samplers.Tree(torch.ones(2, 1), torch.zeros(2), torch.tensor([0, 1]))
    got = tree.log_prob(x, torch.tensor([[0, 1]]).expand(4000, -1))
    z = x[:, 0]
    e = tree_exp(z.abs())
    product = 1.0 + e.double()
    minor = torch.stack([torch.where(z >= 0, z.abs(), 0.0), torch.where(z >= 0, 0.0, z.abs())], 1).double()
    want = (-minor - exact_log(product).unsqueeze(1)).float()
    assert torch.equal(got, want)
