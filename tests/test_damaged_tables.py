"""Tables that a file has damaged: refused when they are loaded, and harmless to the ops otherwise."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from head_cases import batch

import samplex_cuda as sx
from samplex_cuda.samplers import MIDX, Bigram, Mixture, Quadratic, RandomFourier, Tree, Uniform, Unigram

C, D, ROWS = 13, 4, 6
NAMES = ["unigram", "bigram", "tree", "quadratic", "positive", "midx", "mixture"]
INDEX32 = [-1, -2, C, C + 3, (1 << 31) - 1, -(1 << 31)]
INDEX = [-1, -2, C, C + 3, 1 << 40, -(1 << 40), (1 << 63) - 1, -(1 << 63)]
NUMBERS = [float("nan"), float("inf"), -1.0, 1e30, -3e38]


def make(name: str, classes: int = C) -> tuple[sx.samplers.Sampler, torch.Tensor | None]:
    """A sampler, and the context of the rows where it needs one."""
    g = torch.Generator().manual_seed(3)
    weight, tokens = torch.randn(classes, D, generator=g), torch.randint(0, classes, (90,), generator=g)
    x, y = torch.randn(60, D, generator=g), torch.randint(0, classes, (60,), generator=g)
    made = {
        "unigram": lambda: Unigram(torch.arange(classes) + 0.0),
        "bigram": lambda: Bigram.from_tokens(tokens, classes, backoff=0.2),
        "tree": lambda: Tree.fit(x, y, num_classes=classes, dim=3, progress=False),
        "quadratic": lambda: Quadratic(weight),
        "positive": lambda: RandomFourier(weight, 8, 0.5, kind="positive", key=sx.Key(1)),
        "midx": lambda: MIDX(weight, 4, counts=torch.arange(classes) + 0.0, bias=weight[:, 0], key=sx.Key(1)),
        "mixture": lambda: Mixture([(made["tree"](), 1), (Uniform(classes), 1)]),
    }
    return made[name](), torch.arange(ROWS) - 1 if name == "bigram" else None


# ------------------------------------------------------------------------------------------------ at load
DAMAGE = [
    ("unigram", "table", (3, 1), C, r"table must hold classes in \[0, 13\), got 13"),
    ("unigram", "table", (3, 1), 1 << 40, "table must hold classes"),
    ("unigram", "table", (5, 0), 7, "table must draw each class with its weight"),
    ("unigram", "table", (0, 0), 7, "never draw a class of weight 0"),
    ("unigram", "table", (5, 2), 7, "logarithms of the weights"),
    ("unigram", "prefix", (5,), 0, "prefix must not decrease"),
    ("unigram", "prefix", (0,), 1, "prefix must begin with 0"),
    ("unigram", "prefix", (C,), 1 << 62, "positive sum below 2"),
    ("bigram", "table", (2, 1), -1, "table must hold classes"),
    ("bigram", "offsets", (2,), 1 << 50, "offsets must ascend from 0"),
    ("bigram", "pair_ids", (4,), C, r"pair_ids must be in \[0, 13\)"),
    ("bigram", "pair_ids", (1,), 0, "pair_ids must ascend in each context"),
    ("bigram", "pair_table", (4, 1), 50, "pair_table must hold classes"),
    ("bigram", "pair_prefix", (3,), -5, "pair_prefix must"),
    ("bigram", "backoff", (1,), 1.5, "backoff must be 0 or in"),
    ("tree", "class_leaf", (2,), 1 << 40, "class_leaf must be"),
    ("tree", "class_leaf", (2,), 0, "leaf_class must hold every class"),
    ("tree", "leaf_class", (0,), 1 << 40, "leaf_class must hold every class"),
    ("tree", "nodes", (3, 1), float("nan"), "nodes must be finite"),
    ("tree", "nodes", (3, 3), float("nan"), "biases that are not nan"),
    ("tree", "nodes", "padding", 0.0, r"bias \+inf or -inf where one side"),
    ("tree", "projection", (0, 0), float("inf"), "projection must be finite"),
    ("quadratic", "sums", (1, 2), float("nan"), "sums must be finite"),
    ("quadratic", "rows", (1, 2), float("inf"), "rows must be finite"),
    ("positive", "omega", (1, 2), float("nan"), "omega must be finite"),
    ("midx", "codes", (1, 2, 0), float("nan"), "codes must be finite"),
    ("midx", "cell", (2,), 16, r"cell must be in \[0, 16\), got . … 16"),
    ("midx", "cell", (2,), -1, r"cell must be in \[0, 16\), got -1"),
    ("midx", "bias", (2,), float("inf"), "bias must be finite"),
    ("midx", "counts", (2,), -1.0, "counts must not be negative"),
    ("mixture", "weights", (1,), -0.5, "weights must be positive with sum 1"),
    ("mixture", "samplers.0.class_leaf", (2,), 1 << 40, "class_leaf must be"),
]


@pytest.mark.parametrize(("name", "entry", "place", "value", "message"), DAMAGE)
def test_a_damaged_table_is_refused_and_changes_nothing(name, entry, place, value, message):
    sampler, context = make(name)
    before = {k: t.clone() for k, t in sampler.state_dict().items()}
    state = {k: t.clone() for k, t in before.items()}
    if place == "padding":  # a node with classes on one side only
        place = (int(state["nodes"][:, 3].isinf().nonzero()[0]), 3)
    state[entry][place] = value
    with pytest.raises(RuntimeError, match=message) as caught:
        sampler.load_state_dict(state)
    assert "the sampler is unchanged" in str(caught.value)
    assert all(torch.equal(t, before[k]) for k, t in sampler.state_dict().items())
    h = torch.randn(ROWS, D)
    assert bool(sampler.sample(h, 5, context=context).log_q.isfinite().all())
    sampler.load_state_dict(before)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_types_of_tables_are_checked(name):
    sampler, _ = make(name)
    for entry, t in sampler.state_dict().items():
        if entry in ("fit_options", "shift") or entry.endswith("fit_options"):
            continue
        shorter = [t[:-1]] if t.numel() and t.dim() else []  # an empty table cannot lose a row
        for wrong in (*shorter, t.float() if t.dtype != torch.float32 else t.double(), t[None]):
            state = dict(sampler.state_dict())
            state[entry] = wrong
            with pytest.raises(RuntimeError):
                sampler.load_state_dict(state)
    sampler.load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_intact_tables_load(name):
    sampler, context = make(name)
    other, _ = make(name)
    other.load_state_dict(sampler.state_dict())
    h = torch.randn(ROWS, D)
    a, b = (s.sample(h, 9, key=sx.Key(2), context=context) for s in (sampler, other))
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.log_q, b.log_q)


def test_large_tables_pass_the_check():
    counts = torch.rand(300_000, generator=torch.Generator().manual_seed(1)) ** 8
    counts[::7] = 0
    sampler, other = Unigram(counts), Unigram(torch.ones(300_000))
    other.load_state_dict(sampler.state_dict())
    ids = torch.arange(0, 300_000, 1009)
    assert torch.equal(other.log_prob(None, ids[None]), sampler.log_prob(None, ids[None]))


@pytest.mark.parametrize("name", ["tree", "bigram", "mixture"])
def test_a_sampler_of_other_classes_does_not_enter_a_head(name):
    """On their own a tree and a bigram take any size; inside a head C is fixed."""
    head = sx.SampledClassifier(D, C, make(name)[0], num_samples=3)
    other = sx.SampledClassifier(D, C + 1, make(name, C + 1)[0], num_samples=3)
    state = head.state_dict() | {k: t for k, t in other.state_dict().items() if k.startswith("sampler.")}
    with pytest.raises(RuntimeError, match=f"sampler of {C + 1} classes, this SampledClassifier has {C}: make it with"):
        head.load_state_dict(state)
    assert head.sampler.num_classes == C
    if name != "mixture":
        alone = make(name)[0]
        alone.load_state_dict(other.sampler.state_dict())
        assert alone.num_classes == C + 1


def test_padding_is_out_of_reach():
    """Whatever the biases say: a draw of padding would be a class with a wrong probability."""
    tree = Tree(torch.zeros(8, 2), torch.zeros(8), torch.tensor([0, -1, 2, 1, -1, -1, -1, -1]))
    h = torch.randn(ROWS, 2)
    assert tree.log_prob_all(h).exp()[0].tolist() == pytest.approx([0.5, 0.25, 0.25])
    draw = tree.sample(h, 500, key=sx.Key(1))
    assert bool(draw.log_q.isfinite().all())
    assert torch.equal(draw.log_q, tree.log_prob(h, draw.ids))
    tree.load_state_dict(tree.state_dict())


# ------------------------------------------------------------------------------------------------ in the ops
def calls(sampler: sx.samplers.Sampler, h: torch.Tensor, context: torch.Tensor | None, g: random.Random):
    """Every op of a sampler, with and without excluded classes."""
    some = torch.tensor([[g.randrange(-1, C) for _ in range(3)] for _ in range(ROWS)])
    given = {} if context is None else {"context": context}
    for exclude in (None, some[:, 0].clamp_min(0), some):
        yield lambda e=exclude: sampler.sample(h, 9, key=sx.Key(7), exclude=e, **given)
        yield lambda e=exclude: sampler.log_prob(h, some.clamp_min(0), exclude=e, **given)
    yield lambda: sampler.sample(h, 9, shared=True, key=sx.Key(7), **given)
    yield lambda: sampler.log_prob_shared(h, torch.arange(C), **given)
    yield lambda: sampler.log_prob_all(h, **given)
    if isinstance(sampler, Tree):
        yield lambda: sampler.topk(h, 3)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_ops_stay_inside_their_tables(backend, name):
    """Whatever the tables say: ids are classes, nothing outside is read (the simt backend would tell)."""
    h = torch.randn(ROWS, D)
    rounds = 12 if backend.emulated else 60
    sampler, context = make(name)
    for seed in range(rounds):
        g = random.Random(seed)
        kept = {k: t.clone() for k, t in sampler.named_buffers()}
        for _ in range(g.choice([1, 1, 4])):
            t = g.choice([t for k, t in sampler.named_buffers() if t.numel() and k != "fit_options"])
            t.view(-1)[g.randrange(t.numel())] = g.choice(
                {torch.int64: INDEX, torch.int32: INDEX32}.get(t.dtype, NUMBERS)
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call in calls(sampler, h, context, g):
                try:
                    result = call()
                except IndexError as error:  # an excluded class that has no leaf
                    assert "must be" in str(error)  # noqa: PT017
                    continue
                if isinstance(result, sx.Draw):
                    assert bool(((result.ids >= 0) & (result.ids < C)).all())
        for k, t in sampler.named_buffers():
            t.copy_(kept[k])


def test_a_bad_entry_gives_nan_and_not_another_distribution(backend):
    unigram = make("unigram")[0]
    unigram.table[:, 1] = 1 << 40
    draw = unigram.sample(None, 200, batch_size=4, key=sx.Key(1))
    assert bool(draw.log_q.isnan().any())
    assert bool(((draw.log_q.isnan()) == (draw.ids == 0)).all())
    tree = make("tree")[0]
    tree.class_leaf[2] = 1 << 40
    log_p = tree.log_prob_all(torch.randn(3, D))
    assert bool(log_p[:, 2].isnan().all())
    assert bool(log_p[:, :2].isfinite().all())
    assert bool(tree.log_prob(torch.randn(3, D), torch.full((3, 2), 2)).isnan().all())
    tree = make("tree")[0]
    tree.leaf_class[int(tree.class_leaf[4])] = C + 4
    draw = tree.sample(torch.randn(3, D), 300, key=sx.Key(1))
    assert bool(draw.log_q.isnan().any())
    assert bool((draw.ids[draw.log_q.isnan()] == 0).all())


def test_products_with_an_empty_table(backend):
    ids = torch.tensor([[0, 5, -1]])
    for dtype in (torch.float32, torch.float64):
        dots = torch.ops.samplex.predict_dots(torch.randn(1, D, dtype=dtype), torch.empty(0, D, dtype=dtype), ids)
        assert torch.equal(dots, torch.full((1, 3), -torch.inf, dtype=dtype))


def test_a_head_of_one_class_works(backend):
    head = sx.SampledClassifier(12, 1, Unigram([3.0]), num_samples=2)
    loss = head(batch()[0], torch.zeros(7, dtype=torch.int64))
    loss.backward()
    assert loss == 0
    assert not head.weight.grad.to_dense().any()
