"""Distinct draws: the sets by enumeration, unbiased weights, and TensorFlow's numbers on the same draws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from head_cases import make
from training_cases import case

import samplex_cuda as sx
from samplex_cuda.samplers import LogUniform, Uniform, Unigram
from samplex_cuda.training import Config, ConfigError, Trainer, config

SAMPLERS = {
    "uniform": lambda: Uniform(5),
    "log_uniform": lambda: LogUniform(5),
    "unigram": lambda: Unigram([8.0, 0.0, 1.0, 3.0, 0.5]),
}
ROWS = 60_000


def law(sampler, excluded=()):
    p = sampler.log_prob_all()[0].double().exp()
    p[list(excluded)] = 0.0
    return (p / p.sum()).tolist()


def orders(p, m):
    """Probability of each order in which m distinct classes come: one factor for each, without those before."""
    classes = [c for c in range(len(p)) if p[c] > 0]
    for order in itertools.permutations(classes, m):
        chance, left = 1.0, 1.0
        for c in order:
            chance *= p[c] / left
            left -= p[c]
        yield order, chance


@pytest.mark.parametrize("mode", ["inclusion", "tf"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_law_of_the_draws_is_that_of_enumeration(name, mode):
    sampler = SAMPLERS[name]()
    target = torch.full((ROWS,), 3)
    found = sampler.unique(2, exclude=target, key=sx.Key(1), mode=mode)
    ids = found.draw.ids
    expected = dict(orders(law(sampler, [3]), 2))
    assert abs(sum(expected.values()) - 1) < 1e-9
    code = ids[:, 0] * 5 + ids[:, 1]
    statistic, cells = 0.0, 0
    for order, chance in expected.items():
        seen = int((code == order[0] * 5 + order[1]).sum())
        statistic += (seen - ROWS * chance) ** 2 / (ROWS * chance)
        cells += 1
    assert int(sum((code == a * 5 + b).sum() for a, b in expected)) == ROWS  # distinct, and never the excluded class
    assert statistic < cells + 5 * math.sqrt(2 * cells)


@pytest.mark.parametrize("name", SAMPLERS)
def test_weights_by_inclusion_are_unbiased_and_those_of_tf_are_not(name):
    sampler = SAMPLERS[name]()
    p = law(sampler)
    means = {}
    for mode in ("inclusion", "tf"):
        draw = sampler.unique(2, batch_size=ROWS, key=sx.Key(2), mode=mode).draw
        weight = (-draw.log_q.double()).exp() / 2  # what a loss gives to each
        means[mode] = [(weight * (draw.ids == c)).sum(1) for c in range(5) if p[c] > 0]
    for each in means["inclusion"]:
        assert abs(each.mean() - 1) < 5 * each.std() / math.sqrt(ROWS)
    assert max(abs(each.mean() - 1) / (each.std() / math.sqrt(ROWS)) for each in means["tf"]) > 8


def test_tau_is_the_time_of_the_next_distinct_class():
    # With two of two equal classes nothing is left; with one of two tau is the later of two exponentials of rate 1/2.
    found = Uniform(2).unique(2, batch_size=4)
    assert bool((found.level == math.inf).all())
    torch.testing.assert_close(found.draw.log_q, torch.full((4, 2), -math.log(2)))  # certain: weights of 1
    tau = Uniform(2).unique(1, batch_size=ROWS, key=sx.Key(3)).level
    assert abs(tau.mean() - 3.0) < 0.05  # 2 + 1
    for at in (1.0, 3.0, 6.0):
        assert abs((tau < at).double().mean() - (1 - math.exp(-at / 2)) ** 2) < 0.01


def test_a_skewed_law_is_finished_class_by_class_and_stays_unbiased(monkeypatch):
    monkeypatch.setattr("samplex_cuda.samplers.unique._MOST", 1)
    rows = 4000
    p = torch.tensor([1e6, 1.0, 2.0, 4.0])
    draw = Unigram(p).unique(2, batch_size=rows, key=sx.Key(5)).draw
    assert bool((draw.ids[:, 0] != draw.ids[:, 1]).all())
    second = draw.ids.amax(1)  # one is nearly always class 0
    share = torch.bincount(second, minlength=4)[1:].double() / rows
    torch.testing.assert_close(share, torch.tensor([1.0, 2.0, 4.0]).double() / 7, atol=0.04, rtol=0)
    for c in range(4):
        each = ((-draw.log_q.double()).exp() / 2 * (draw.ids == c)).sum(1)
        assert abs(each.mean() - 1) < 5 * max(float(each.std()), 1e-6) / math.sqrt(rows)
    with pytest.raises(ValueError, match="too skewed; use unique=True"):
        Unigram(p).unique(3, batch_size=2, mode="tf")


def test_all_classes_once_is_the_full_softmax():
    head = make(9, 4, 8, sampler=Uniform(9), reduction="none")
    h, y = torch.randn(6, 4), torch.randint(9, (6,))
    loss = head(h, y, negatives=Uniform(9).sample(h, 8, exclude=y, unique=True))
    torch.testing.assert_close(loss, head.eval()(h, y), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- per context
def bigram(backoff=0.3):
    """Contexts 0 and 1 have followers of their own, context 2 none."""
    return sx.samplers.Bigram(
        [0, 3, 5, 5], [1, 2, 4, 0, 3], [4, 1, 2, 6, 1], [8.0, 1.0, 1.0, 3.0, 0.5], backoff=backoff
    )


@pytest.mark.parametrize("mode", ["inclusion", "tf"])
@pytest.mark.parametrize("context", [0, 1, 2, -1])
def test_distinct_draws_of_a_context_are_those_of_enumeration(mode, context):
    sampler, rows = bigram(), 20_000
    contexts = torch.full((rows,), context)
    p = sampler.log_prob_all(context=contexts[:1])[0].double().exp()
    p[3] = 0.0
    p = (p / p.sum()).tolist()
    exclude = torch.full((rows,), 3)
    ids = sampler.unique(2, context=contexts, exclude=exclude, key=sx.Key(1), mode=mode).draw.ids
    code, statistic, cells, found = ids[:, 0] * 5 + ids[:, 1], 0.0, 0, 0
    for order, chance in orders(p, 2):
        seen = int((code == order[0] * 5 + order[1]).sum())
        statistic, cells, found = statistic + (seen - rows * chance) ** 2 / (rows * chance), cells + 1, found + seen
    assert found == rows
    assert statistic < cells + 5 * math.sqrt(2 * cells)


@pytest.mark.parametrize("shared", [False, True])
def test_weights_by_inclusion_are_unbiased_for_each_context(shared):
    sampler, rows = bigram(), 20_000 if not shared else 1
    weights = []
    if shared:
        contexts = torch.tensor([0, 1, 1])
        for seed in range(1200):
            draw = sampler.sample(None, 2, shared=True, context=contexts, unique=True, key=sx.Key(seed))
            assert draw.ids.shape == (2,)
            weights.append(torch.zeros(5, dtype=torch.float64).scatter_(0, draw.ids, (-draw.log_q.double()).exp() / 2))
    else:
        contexts = torch.arange(rows) % 3
        draw = sampler.sample(None, 2, context=contexts, unique=True, key=sx.Key(2))
        each = (-draw.log_q.double()).exp() / 2
        weights = torch.zeros(rows, 5, dtype=torch.float64).scatter_(1, draw.ids, each).unbind()
    each = torch.stack(list(weights))
    error = each.std(0) / math.sqrt(each.shape[0])
    assert bool(((each.mean(0) - 1).abs() < 5 * error).all())


def test_a_context_is_finished_class_by_class_too(monkeypatch):
    monkeypatch.setattr("samplex_cuda.samplers.unique._MOST", 1)
    sampler, rows = bigram(), 3000
    contexts = torch.arange(rows) % 3
    draw = sampler.sample(None, 3, context=contexts, unique=True, key=sx.Key(5), exclude=torch.full((rows,), 4))
    assert bool((draw.ids.sort(1).values.diff(dim=1) > 0).all())
    weight = torch.zeros(rows, 5, dtype=torch.float64).scatter_(1, draw.ids, (-draw.log_q.double()).exp() / 3)
    assert bool((weight[:, 4] == 0).all())
    error = weight.std(0)[:4] / math.sqrt(rows)
    assert bool(((weight.mean(0)[:4] - 1).abs() < 5 * error.clamp(min=1e-9)).all())


def test_distinct_draws_of_a_bigram_in_a_head():
    head = make(5, 4, 4, sampler=bigram(), unique=True, reduction="none")
    h, y, context = torch.randn(6, 4), torch.randint(5, (6,)), torch.tensor([0, 1, 2, -1, 0, 1])
    torch.testing.assert_close(head(h, y, context=context), head.eval()(h, y), rtol=1e-5, atol=1e-5)  # all classes
    with pytest.raises(ValueError, match="with unique, num_samples must be at most 2, the remaining classes, got 3"):
        bigram(0.0).unique(3, context=torch.tensor([1]))
    with pytest.raises(ValueError, match="num_samples must be at most 5 with unique, got 6"):
        bigram().unique(6, context=context)
    sampler = bigram()
    found = sampler.unique(2, context=context, mode="tf")
    log_pi = sampler.log_inclusion(found.draw.ids, found.level, "tf", context=context)
    torch.testing.assert_close(log_pi - math.log(2), found.draw.log_q.double(), rtol=1e-5, atol=1e-5)


def tensorflow(h, weight, bias, y, ids, expected_ids, expected_y):
    """`tf.nn.sampled_softmax_loss` with remove_accidental_hits, from its definition."""
    sampled = h @ weight[ids].T + bias[ids] - expected_ids.log()
    sampled = sampled.masked_fill(ids[None] == y[:, None], -torch.inf)
    true = (h * weight[y]).sum(1) + bias[y] - expected_y.log()
    return torch.cat([true[:, None], sampled], 1).logsumexp(1) - true


def test_the_loss_of_tensorflow_on_the_same_candidates():
    c, d, b, m = 200, 8, 32, 40
    g = torch.Generator().manual_seed(0)
    h, weight, bias = torch.randn(b, d, generator=g), torch.randn(c, d, generator=g), torch.randn(c, generator=g)
    y, sampler = torch.randint(c, (b,), generator=g), LogUniform(c)
    found = sampler.unique(m, shared=True, mode="tf", key=sx.Key(7))
    ids, tries = found.draw.ids, float(found.level)
    p = sampler.log_prob_all()[0].double().exp()
    expected = 1 - (1 - p) ** tries
    want = tensorflow(h.double(), weight.double(), bias.double(), y, ids, expected[ids], expected[y])
    of_target = sampler.log_inclusion(y[:, None], found.level.expand(b), "tf")
    log_q = (found.draw.log_q - of_target).float()
    loss = sx.functional.sampled_softmax(h, weight, y, ids.expand(b, m), log_q, bias, reduction="none")
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unique", [True, "tf"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_head_draws_distinct_classes(unique, shared):
    head = make(50, 4, 30, sampler=LogUniform(50), shared=shared, unique=unique)
    h, y = torch.randn(6, 4), torch.randint(50, (6,))
    draw = head._draw(head.spec(), h, y, None, None, sx.Key(1))[0]
    rows = draw.ids.reshape(-1, 30)
    assert all(row.unique().shape[0] == 30 for row in rows)
    loss = head(h, y, key=sx.Key(1))
    want = sx.functional.sampled_softmax(h, head.weight, y, draw.ids, draw.log_q, head.bias)
    torch.testing.assert_close(loss, want)
    loss.backward()
    assert head.weight.grad.is_sparse


def test_the_same_key_gives_the_same_draw_and_errors_come_first():
    first, second = (LogUniform(100).sample(None, 20, unique=True, shared=True, key=sx.Key(9)) for _ in range(2))
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(first.log_q, second.log_q)
    with pytest.raises(ValueError, match="num_samples must be at most 4 with unique, got 5"):
        Uniform(4).sample(None, 5, unique=True, shared=True)
    with pytest.raises(ValueError, match="with unique, num_samples must be at most 4, the remaining classes"):
        Unigram([1.0, 0.0, 1.0, 1.0, 1.0]).unique(5, batch_size=1)
    with pytest.raises(ValueError, match="unique mode must be one of"):
        Uniform(4).sample(None, 2, unique="with", shared=True)
    with pytest.raises(ValueError, match="unique must be False unless the sampler is"):
        make(9, 4, 3, sampler=sx.samplers.Quadratic(torch.randn(9, 4)), bias=False, unique=True)


def test_a_run_draws_distinct_classes(tmp_path):
    run, train, valid = case("mlp", "unigram", "head.unique=tf", "training.epochs=1")
    trainer = Trainer(run, train, valid, tmp_path / "run")
    assert trainer.head.spec().sampling["unique"] == "tf"
    assert trainer.fit().status == "finished"
    with pytest.raises(ConfigError, match="unique must be false with the sampler tree"):
        config.override(Config(), ["sampler.name=tree", "head.unique=true"]).check()
