"""Samplers over other classes: `over`, `resize`, and what a head makes of them when classes come and go."""

from __future__ import annotations

import copy

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda.samplers.live import LiveClasses

CLASSES, DIM, BATCH = 37, 6, 5


def table(rows: int = CLASSES, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(seed))


def queries() -> torch.Tensor:
    return table(BATCH, 9)


def tree(**options) -> sx.samplers.Tree:
    g = torch.Generator().manual_seed(3)
    y = torch.randint(CLASSES, (400,), generator=g)
    x = table()[y] + 0.3 * torch.randn(400, DIM, generator=g)
    return sx.samplers.Tree.fit(x, y, num_classes=CLASSES, dim=3, progress=False, **options)


def bigram() -> sx.samplers.Bigram:
    tokens = torch.randint(CLASSES, (300,), generator=torch.Generator().manual_seed(2))
    return sx.samplers.Bigram.from_tokens(tokens, CLASSES, backoff=0.25)


def counts() -> torch.Tensor:
    return torch.arange(1.0, CLASSES + 1)


SAMPLERS = {
    "quadratic": lambda: sx.samplers.Quadratic(table(), alpha=3.0),
    "quadratic_bias": lambda: sx.samplers.Quadratic(table(), alpha=3.0, bias=table()[:, 0]),
    "rff": lambda: sx.samplers.RandomFourier(table(), num_features=512, nu=0.1, normalize=True, key=sx.Key(5)),
    "positive": lambda: sx.samplers.RandomFourier(
        table(), num_features=64, nu=0.5, kind="positive", normalize=True, key=sx.Key(5)
    ),
    "midx": lambda: sx.samplers.MIDX(table(), num_codes=8, key=sx.Key(1)),
    "midx_counts": lambda: sx.samplers.MIDX(
        table(), num_codes=64, kind="product", key=sx.Key(1), bias=table()[:, 0], counts=counts()
    ),
    "softmax": lambda: sx.samplers.Softmax(table()),
    "quartic": lambda: sx.samplers.Quartic(table(), table()[:, 0]),
    "tree": tree,
    "tree_base": lambda: tree(base=sx.samplers.Unigram(counts()), dtype=torch.bfloat16),
    "bigram": bigram,
    "mixture": lambda: sx.samplers.Mixture(
        [(sx.samplers.Quadratic(table()), 1.0), (sx.samplers.Unigram(counts()), 3.0), (tree(), 1.0)]
    ),
    "uniform": lambda: sx.samplers.Uniform(CLASSES),
    "unigram": lambda: sx.samplers.Unigram(counts()),
}
OF_ROWS = ("quadratic", "quadratic_bias", "rff", "positive", "midx", "midx_counts", "softmax", "quartic")


def given(name: str) -> dict:
    return {"context": torch.tensor([0, 3, 3, 20, -1])} if name == "bigram" else {}


def every(sampler, name: str) -> torch.Tensor:
    """Probabilities of all classes, [B, C] float64."""
    found = sampler.log_prob_all(queries(), **given(name)) if name == "bigram" else sampler.log_prob_all(queries())
    return found.double().exp()


def some_live(classes: int) -> torch.Tensor:
    live = torch.ones(classes, dtype=torch.bool)
    live[torch.tensor([0, 5, 6, 7, 8, 30])] = False
    return live


@pytest.mark.parametrize("classes", [CLASSES, CLASSES + 40, CLASSES - 3])
@pytest.mark.parametrize("name", SAMPLERS)
def test_only_live_classes_are_drawn(name, classes):
    sampler, live = SAMPLERS[name](), some_live(classes)
    before = {key: t.clone() for key, t in sampler.state_dict().items()}
    for made in (sampler.over(classes, live), sampler.over(classes).over(classes, live)):
        assert made.num_classes == classes
        law = every(made, name)
        torch.testing.assert_close(law.sum(1), torch.ones(BATCH, dtype=torch.float64), rtol=0, atol=1e-5)
        assert not bool(law[:, ~live].any())
        if "rff" not in name:  # whose estimates may be below zero for a class
            assert bool((law[:, live] > 0).all())
        h, target = queries(), live.nonzero()[:BATCH, 0]
        draw = made.sample(h, 200, exclude=target, key=sx.Key(4), **given(name))
        assert bool(live[draw.ids].all())
        assert not bool((draw.ids == target[:, None]).any())
        again = made.log_prob(h, draw.ids, exclude=target, **given(name))
        torch.testing.assert_close(draw.log_q, again, rtol=0, atol=1e-6)
        shared = made.sample(h, 200, shared=True, key=sx.Key(4), **given(name))
        assert bool(live[shared.ids].all())
        torch.testing.assert_close(shared.log_q.double(), law.mean(0)[shared.ids].log(), rtol=0, atol=1e-4)
        loaded = copy.deepcopy(made)
        loaded.load_state_dict(made.state_dict())
        torch.testing.assert_close(every(loaded, name), law, rtol=0, atol=0)
    assert all(torch.equal(t, before[key]) for key, t in sampler.state_dict().items())


@pytest.mark.parametrize("name", ["quadratic", "quadratic_bias", "softmax", "quartic", "uniform", "unigram"])
def test_the_distribution_is_conditioned_on_the_live_classes(name):
    sampler, live = SAMPLERS[name](), some_live(CLASSES)
    whole = every(sampler, name) * live
    torch.testing.assert_close(every(sampler.over(CLASSES, live), name), whole / whole.sum(1, True), rtol=1e-4, atol=0)


@pytest.mark.parametrize("retired", [False, True])
@pytest.mark.parametrize("name", OF_ROWS)
def test_a_sampler_that_follows_the_table_is_as_if_made_from_it(name, retired):
    """After `rebuild`, and after `update` of all rows, nothing is left of the rows of before."""
    rows, live = table(CLASSES + 9, 1), some_live(CLASSES + 9) if retired else None
    kept = torch.arange(CLASSES + 9) if live is None else live.nonzero().squeeze(1)
    made = SAMPLERS[name]().over(CLASSES + 9, live)
    assert isinstance(made, LiveClasses) == retired
    bias = (rows[:, 1],) if made.has_bias else ()
    made.rebuild(rows, *bias)
    inside = made.sampler if retired else made
    fresh = copy.deepcopy(inside)
    fresh.rebuild(rows[kept], *(b[kept] for b in bias))
    law = torch.zeros(BATCH, CLASSES + 9, dtype=torch.float64)
    law[:, kept] = every(fresh, name)
    torch.testing.assert_close(every(made, name), law, rtol=1e-5, atol=1e-9)
    if "midx" not in name:  # whose codes stay
        other = SAMPLERS[name]().over(CLASSES + 9, live)
        order = torch.randperm(CLASSES + 9)
        for part in order.split(7):
            other.update(part, rows[part], *(b[part] for b in bias))
        torch.testing.assert_close(every(other, name), law, rtol=1e-3, atol=1e-6)
    scores = queries() @ rows[kept].T
    if name == "softmax":
        torch.testing.assert_close(law[:, kept], scores.double().softmax(1), rtol=1e-4, atol=0)
    if name == "quadratic":
        kernel = 3.0 * scores.double().square() + 1
        torch.testing.assert_close(law[:, kept], kernel / kernel.sum(1, True), rtol=1e-4, atol=0)


def test_codes_that_were_too_few_for_the_classes_become_more():
    small = sx.samplers.MIDX(table(4), num_codes=16, key=sx.Key(0))
    assert small.num_codes == 4
    made = small.over(100)
    made.rebuild(table(100))
    assert made.num_codes == 16
    wanted = sx.samplers.MIDX(table(100), num_codes=16, key=sx.Key(0))
    assert torch.equal(made.log_prob_all(queries()), wanted.log_prob_all(queries()))
    assert made.over(3).num_codes == 3


def test_an_index_over_live_classes_makes_new_codes_in_time():
    sampler = sx.samplers.MIDX(table(), num_codes=8, key=sx.Key(1)).over(CLASSES, some_live(CLASSES))
    codes, rows = sampler.sampler.codes.clone(), table(CLASSES, 4)
    for _ in range(3):
        sampler.follow(torch.arange(CLASSES), rows)
    assert torch.equal(sampler.sampler.codes, codes)
    sampler.follow(torch.arange(CLASSES), rows)
    assert not torch.equal(sampler.sampler.codes, codes)
    with pytest.raises(ValueError, match="weight must be given"):  # no second copy of the table is kept
        sampler.sampler.refresh()


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "bigram"])
def test_in_place(name):
    sampler = SAMPLERS[name]()
    wanted = every(sampler.over(CLASSES + 5), name)
    hook = sampler.register_forward_hook(lambda *_: None)
    sampler.resize(CLASSES + 5)
    assert sampler.num_classes == CLASSES + 5
    assert len(sampler._forward_hooks) == 1
    hook.remove()
    if name != "unigram":  # `resize` leaves classes of count 0 out
        torch.testing.assert_close(every(sampler, name), wanted, rtol=1e-6, atol=0)
    for wrong in (0, -1, True, 2.0):
        with pytest.raises((ValueError, TypeError), match="num_classes must be"):
            sampler.resize(wrong)
    assert sampler.num_classes == CLASSES + 5


# ------------------------------------------------------------------------------------------------ trees
def test_a_deeper_tree_keeps_the_old_classes_as_they_are_to_each_other():
    sampler = tree()
    before, leaves = every(sampler, "tree"), sampler.leaf_class.shape[0]
    made = sampler.over(leaves + 7)
    assert made.depth == sampler.depth + 1
    law = every(made, "tree")
    new = law[:, CLASSES:]
    assert bool((new > 0).all())
    # Classes beside which no new one came: all parts of the tree without free leaves.
    full = sampler.over(CLASSES)
    torch.testing.assert_close(every(full, "tree"), before, rtol=0, atol=0)
    weights, _ = made.parameters_of_nodes()
    old, _ = sampler.parameters_of_nodes()
    assert torch.equal(weights[2], old[1])
    assert torch.equal(weights[4:6], old[2:4])


def test_new_classes_of_a_tree_share_by_number():
    """A full tree of 4, and 2 more: the new root sends a third to the right, half of it to each."""
    weights = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    small = sx.samplers.Tree(weights, torch.tensor([0.0, 0.3, -0.2, 1.0]), torch.tensor([2, 0, 3, 1]))
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
    law = small.over(6).log_prob_all(x).exp()
    torch.testing.assert_close(law[:, :4], small.log_prob_all(x).exp() * 2 / 3)
    torch.testing.assert_close(law[:, 4:], torch.full((3, 2), 1 / 6))
    more = small.over(6).over(8).log_prob_all(x).exp()  # nodes that split by number go on to do so
    torch.testing.assert_close(more[:, :4], small.log_prob_all(x).exp() / 2)
    torch.testing.assert_close(more[:, 4:], torch.full((3, 4), 1 / 8))


def test_a_class_that_comes_back_to_a_tree_is_drawn_again():
    sampler, live = tree(), some_live(CLASSES)
    back = sampler.over(CLASSES, live).over(CLASSES)
    law = every(back, "tree")
    assert bool((law > 0).all())
    assert torch.equal(back.leaf_class, sampler.leaf_class)
    refitted = back.refit(*_data(), progress=False)
    assert bool((every(refitted, "tree") > 0).all())


def _data():
    g = torch.Generator().manual_seed(3)
    y = torch.randint(CLASSES, (400,), generator=g)
    return table()[y] + 0.3 * torch.randn(400, DIM, generator=g), y


def test_the_pairs_of_a_bigram_stay():
    sampler = bigram()
    law = every(sampler, "bigram")
    torch.testing.assert_close(every(sampler.over(CLASSES), "bigram"), law, rtol=1e-6, atol=0)
    made = sampler.over(CLASSES + 3)
    assert made.num_contexts == CLASSES + 3
    with_new = made.log_prob_all(context=torch.tensor([CLASSES + 1])).exp()
    torch.testing.assert_close(with_new, made.log_prob_all(context=torch.tensor([-1])).exp())
    only = every(sampler.over(CLASSES, some_live(CLASSES)), "bigram")
    pairs = sampler.over(CLASSES, some_live(CLASSES)).pair_ids
    assert bool(some_live(CLASSES)[pairs].all())
    assert not bool(only[:, ~some_live(CLASSES)].any())


# ------------------------------------------------------------------------------------------------ in-batch
def test_in_batch_frequencies_grow_and_forget_what_left():
    sampler = sx.samplers.InBatch(CLASSES, extra=sx.samplers.Quadratic(table()))
    stream = torch.randint(CLASSES, (50, 64), generator=torch.Generator().manual_seed(0))
    for ids in stream:
        sampler.frequency.update(ids)
    live = some_live(CLASSES + 4)
    made = sampler.over(CLASSES + 4, live)
    ids = torch.arange(CLASSES)
    same = live[:CLASSES]
    assert torch.equal(made.frequency.log_q(ids)[same], sampler.frequency.log_q(ids)[same])
    never = float(made.frequency.log_q(torch.tensor([CLASSES + 2])))
    assert made.frequency.log_q(ids)[~same].tolist() == [never] * 6
    assert isinstance(made.extra, LiveClasses)
    drawn = made.sample(queries(), 100, targets=torch.tensor([1, 2, 3, 4, CLASSES + 1]), key=sx.Key(0)).ids
    assert bool(live[drawn].all())
    sketch = sx.samplers.InBatch(CLASSES, sx.samplers.StreamingFrequency(64, kind="sketch"))
    assert sketch.over(50).frequency.num_buckets == 64  # any id has a bucket
    with pytest.raises(ValueError, match="kind must be 'gap' to resize"):
        sketch.frequency.resize(50)
    fixed = sx.samplers.InBatch(CLASSES, sx.samplers.Unigram(counts()))
    assert not bool(fixed.over(CLASSES, some_live(CLASSES)).log_prob_all().exp()[0, 0])


# ------------------------------------------------------------------------------------------------ heads
HEADS = {name: SAMPLERS[name] for name in SAMPLERS if name != "bigram"} | {
    "in_batch": lambda: sx.samplers.InBatch(CLASSES, extra=sx.samplers.Uniform(CLASSES))
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_with_any_sampler(name):
    torch.manual_seed(0)
    sampler = HEADS[name]()
    shared = name in ("in_batch", "softmax")
    head = sx.SampledClassifier(DIM, CLASSES, sampler, 12, bias=sampler.has_bias, shared=shared)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))

    def train(ids: torch.Tensor) -> None:
        for number in range(3):
            head(table(BATCH, number), ids[torch.arange(BATCH) * 5 % len(ids)], key=sx.Key(number)).backward()

    train(torch.arange(CLASSES))
    out = torch.tensor([2, 11, 30])
    head.retire_classes(out)
    live = torch.ones(CLASSES, dtype=torch.bool)
    live[out] = False
    train(live.nonzero().squeeze(1))
    assert not bool(head.weight[out].any())
    head.eval()(queries(), torch.arange(3, 8))  # brings the sampler up to date
    head.train()
    if name in ("quadratic", "softmax"):
        inside = head.sampler.sampler
        held = inside.rows if name == "quadratic" else inside.weight
        head(queries(), torch.arange(3, 8), key=sx.Key(0))
        assert torch.equal(held[:, :DIM], head.weight.detach()[live])
    ids = head.add_classes(5)
    assert ids.tolist() == [2, 11, 30, CLASSES, CLASSES + 1]
    assert head.sampler.num_classes == CLASSES + 2
    assert type(head.sampler) is type(sampler) or name == "uniform"
    train(ids)
    assert bool(head.weight[ids].any(1).all())
    head.resize(CLASSES - 10)
    train(torch.arange(CLASSES - 10))


def test_a_sampler_that_reads_the_table_itself():
    head = sx.SampledClassifier(DIM, CLASSES, sx.samplers.Uniform(CLASSES), 12, bias=False)
    head.sampler = sx.samplers.Softmax(head.weight, copy=False)
    head.resize(CLASSES + 3)
    torch.testing.assert_close(
        head.sampler.log_prob_all(queries()), (queries() @ head.weight.T).log_softmax(1).detach(), rtol=0, atol=1e-5
    )
    before = head.weight.detach().clone()
    with pytest.raises(ValueError, match="copy must be True to leave out classes"):
        head.retire_classes(torch.tensor([1]))
    assert head.live is None
    assert torch.equal(head.weight, before)


class Own(sx.samplers.Sampler):
    """A sampler of a user, who did not think of other classes."""

    _op = "own"

    def __init__(self) -> None:
        super().__init__()
        self.num_classes = CLASSES

    def sample(self, h, num_samples, **_):
        return sx.samplers.Uniform(CLASSES).sample(h, num_samples)


def test_what_cannot_be_resized_says_so():
    head = sx.SampledClassifier(DIM, CLASSES, Own(), 12)
    with pytest.raises(ValueError, match="sampler must be given if that of the head cannot be resized, got None with"):
        head.resize(50)
    assert head.num_classes == CLASSES
    with pytest.raises(NotImplementedError, match="own: a Own cannot be resized; create a new one"):
        head.sampler.resize(50)
    for name in ("quadratic", "tree", "bigram", "mixture", "unigram"):
        sampler = SAMPLERS[name]()
        for live in (torch.ones(3, dtype=torch.bool), torch.ones(CLASSES), [True] * CLASSES):
            with pytest.raises(ValueError, match=r"live must be \[37\] bool, got"):
                sampler.over(CLASSES, live)
        with pytest.raises(ValueError, match="live must contain at least one class that can be drawn, got none"):
            sampler.over(CLASSES, torch.zeros(CLASSES, dtype=torch.bool))


def test_retired_classes_inside_are_checked():
    made = SAMPLERS["quadratic"]().over(CLASSES, some_live(CLASSES))
    for wrong in (-1, CLASSES):
        with pytest.raises(IndexError, match=r"live_classes: ids must be in \[0, 37\)"):
            made.log_prob(queries(), torch.full((BATCH,), wrong))
    other = SAMPLERS["quadratic"]().over(CLASSES, torch.arange(CLASSES) != 3)
    with pytest.raises(RuntimeError, match="retire the same classes first"):
        other.load_state_dict(made.state_dict())
    state = made.state_dict()
    state["ids"] = state["ids"].flip(0)
    with pytest.raises(RuntimeError, match="ids must be ascending classes"):
        made.load_state_dict(state)
