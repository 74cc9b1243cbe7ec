"""The theory of Wu et al. 2025 as checks that take seconds, and the models and data of its experiments."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as nnf

from samplex_cuda.reproduce import attention_theory as theory
from samplex_cuda.reproduce.attention_models import (
    IRRELEVANT,
    LEVELS,
    MASS,
    Corpus,
    OneLayer,
    TwoLayer,
    accuracy,
    imdb,
    k_level,
    k_level_law,
    posterior_difference,
    signed_frequency,
    slope,
    spearman,
    stem,
    tokens_of,
    train,
)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_corpus(count, length, tokens, seed=0):
    labels = torch.ones(count)
    labels[::2] = -1
    return Corpus(torch.randint(tokens, (count, length), generator=generator(seed)), labels, tokens)


# ------------------------------------------------------------------------------------------------ E1: Lemma 4.1
def test_one_step_and_its_rate_in_d():
    corpus, dims = random_corpus(400, 32, 200), [256, 1024, 4096]
    found = [theory.first_step(corpus, d, 1.0, generator(1)) for d in dims]
    for d, f in zip(dims, found, strict=True):
        assert max(f.error_s, f.error_p) <= 11 * d**-0.25
    assert slope(dims, [f.error_s for f in found]) == pytest.approx(-0.5, abs=0.15)
    assert found[-1].error_s < 0.1 * found[-1].signal  # what is left is alpha v
    assert found[-1].signal == pytest.approx(float(signed_frequency(corpus).abs().max()) / 2)


def test_the_step_scales_with_its_rate():
    corpus = random_corpus(20, 6, 12)
    one, ten = (theory.first_step(corpus, 64, rate, generator(1)) for rate in (1.0, 10.0))
    start, p, _ = theory.start(12, 64, generator(1))
    torch.testing.assert_close(ten.embedding - start, 10 * (one.embedding - start))
    torch.testing.assert_close(ten.p - p, 10 * (one.p - p))


# ------------------------------------------------------------------------------------------------ E2: A.1, A.2
def test_gradients_are_those_of_lemma_a1():
    corpus = random_corpus(6, 5, 9)
    embedding, p, v = theory.start(9, 7, generator())
    leaves = embedding.clone().requires_grad_(), p.clone().requires_grad_()
    got = torch.autograd.grad(theory.loss_of(corpus, *leaves, v), leaves)
    for a, b in zip(got, theory.lemma_a1(corpus, embedding, p, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_directional_gradient_is_that_of_lemma_a2():
    corpus = random_corpus(6, 5, 9)
    embedding, p, v = theory.start(9, 7, generator())
    direction = torch.randn(7, generator=generator(3), dtype=torch.float64)
    rows = embedding[corpus.ids]
    q, gamma, a_hat = (rows @ p).softmax(1), corpus.labels[:, None] * (rows @ v), rows @ direction
    g = torch.sigmoid(-(q * gamma).sum(1))
    pairs = q[:, :, None] * q[:, None] * (a_hat[:, :, None] - a_hat[:, None]) * (gamma[:, :, None] - gamma[:, None])
    wanted = -(g * pairs.sum((1, 2)) / 2).mean()
    leaf = p.clone().requires_grad_()
    (d_p,) = torch.autograd.grad(theory.loss_of(corpus, embedding, leaf, v), leaf)
    torch.testing.assert_close(direction @ d_p, wanted, rtol=1e-12, atol=1e-15)
    step = 1e-6
    up, down = (theory.loss_of(corpus, embedding, p + s * step * direction, v) for s in (1, -1))
    torch.testing.assert_close((up - down) / (2 * step), wanted, rtol=1e-6, atol=1e-10)


# ------------------------------------------------------------------------------------------------ E3, E5: the flow
def test_assumption_1_data():
    data = theory.assumption_1(4, 4)
    alpha = signed_frequency(data)
    assert (alpha[:4] > 0).all()
    assert (alpha[4:8] < 0).all()
    assert (alpha[8:] == 0).all()
    assert sorted(data.ids.unique().tolist()) == list(range(data.num_tokens))


@pytest.fixture(scope="module")
def step_of_ten():
    data = theory.assumption_1(4, 4)
    return data, theory.first_step(data, 1024, 10.0, generator(4))


def test_the_flow_turns_to_the_max_margin_direction(step_of_ten):
    found = theory.flow(*step_of_ten, norm=110.0, length=0.2)
    assert found.selected
    assert found.norms[-1] >= 110
    assert found.cosine_at(20) > 0.99
    assert found.cosine_at(100) > 0.9998
    assert all(b <= a + 1e-12 for a, b in zip(found.losses, found.losses[1:], strict=False))


def test_the_textbook_gradient_loses_the_direction(step_of_ten):
    """The trap that the stable form of attention_pool avoids: q (g - f) at margins beyond 36."""
    found = theory.flow(*step_of_ten, norm=300.0, length=0.5, fused=False, most=2000)
    stable = theory.flow(*step_of_ten, norm=300.0, length=0.5)
    assert stable.cosines[-1] > 0.999
    assert found.cosines[-1] < 0.99


def test_the_quadratic_program(step_of_ten):
    data, step = step_of_ten
    p, margins = theory.max_margin(data, step.embedding)
    other, _ = theory.max_margin(data, step.embedding, start_at=5.0)
    torch.testing.assert_close(p, other, rtol=1e-9, atol=1e-12)
    assert float(margins.min()) == pytest.approx(1.0, abs=1e-9)
    assert float(p.norm()) <= 4 * len(data.labels)
    # Optimal: no feasible point close by is shorter.
    for seed in range(20):
        moved = p + 0.05 * torch.randn(len(p), generator=generator(seed), dtype=torch.float64) / len(p) ** 0.5
        rows = step.embedding[data.ids]
        smallest = ((rows[:, :1] - rows[:, 1:]) @ moved).min()
        assert float(moved.norm() / smallest) >= float(p.norm()) - 1e-9


# ------------------------------------------------------------------------------------------------ E4, E6
def test_a_direction_that_selects_all_tokens_has_no_gradient():
    corpus = random_corpus(6, 5, 9)
    embedding, p, v = theory.start(9, 64, generator())
    alike = torch.linalg.lstsq(embedding, torch.ones(9, 1, dtype=torch.float64)).solution.squeeze(1)
    leaf = p.clone().requires_grad_()
    (d_p,) = torch.autograd.grad(theory.loss_of(corpus, embedding, leaf, v), leaf)
    assert abs(float(alike @ d_p)) < 1e-13 * float(alike.norm())
    assert float(d_p.norm()) > 1e-3


def test_sizes_and_loss_after_the_first_step(step_of_ten):
    data, step = step_of_ten
    assert float(step.embedding.norm(dim=1).max()) <= 2 * (1 + 2 * 10.0)  # B.1
    assert float(step.p.norm()) <= 2 + 11 * 10.0 * 1024**-0.25
    alpha = signed_frequency(data)[data.ids].mean(1) * data.labels
    bound = nnf.softplus(-5.0 * alpha + 1 / 220).mean()
    assert float(theory.loss_of(data, step.embedding, step.p, step.v)) <= float(bound)  # B.2


# ------------------------------------------------------------------------------------------------ E7: K-level data
def test_the_corrected_law_is_one():
    law, difference = k_level_law()
    assert law.shape == (2, 2048)
    torch.testing.assert_close(law.sum(1), torch.ones(2, dtype=torch.float64))
    # Eq. 16 follows from it.
    torch.testing.assert_close((law[1] - law[0]) / law.sum(0), difference)
    # As printed, without delta~ in the third case, it is none.
    half = (2048 - IRRELEVANT) // 2
    printed = 1 - MASS + law[1, IRRELEVANT : IRRELEVANT + half].sum() + law[1, IRRELEVANT + half :].sum() / MASS
    assert float(printed) == pytest.approx(1.07, abs=0.01)
    assert sum(4 + 2**k for k in range(1, 9)) * 2 + IRRELEVANT == 2048
    assert sum(4 + 2 ** (k - 1) for k in range(1, 9)) * 2 + IRRELEVANT == 1538
    assert len(LEVELS) == 8


def test_k_level_sequences_follow_the_law():
    corpus = k_level(400, 256, generator())
    _, counts = posterior_difference(corpus)
    share = float(counts[IRRELEVANT:].sum() / counts.sum())
    assert share == pytest.approx(MASS, abs=0.003)
    difference, _ = posterior_difference(corpus)
    _, wanted = k_level_law()
    often = counts >= 5
    assert spearman(difference[often & (wanted != 0)], wanted[often & (wanted != 0)]) > 0.8


def test_training_orders_the_tokens():
    corpus = k_level(300, 256, generator())
    model = OneLayer(corpus.num_tokens, 32, train_v=True, generator=generator(1))
    losses = train(model, corpus, epochs=25, rate=1e-2, decay=1e-4, batch=64, milestones=[20], generator=generator(2))
    assert losses[-1] < 0.2 * losses[0]
    difference, counts = posterior_difference(corpus)
    seen = (torch.arange(2048) >= IRRELEVANT) & (counts > 0)
    assert spearman((model.rows() @ model.v.detach())[seen], difference[seen]) > 0.7
    assert accuracy(model, corpus) > 0.95


# ------------------------------------------------------------------------------------------------ models
def test_v_is_fixed_or_trained():
    assert OneLayer(5, 3, train_v=True).v.requires_grad
    model = OneLayer(5, 3, train_v=False)
    assert not model.v.requires_grad
    assert float(model.v.norm()) == pytest.approx(1.0)


def test_two_layers_against_a_loop():
    model = TwoLayer(9, 6, train_v=True, generator=generator())
    ids = torch.tensor([[1, 2, 2, -1], [8, -1, -1, -1]])
    got = model(ids)
    for row, value in zip(ids, got, strict=True):
        e = model.embedding[row[row >= 0]]
        inner = nnf.layer_norm(torch.softmax(e @ e.T, 1) @ e + e, (6,))
        torch.testing.assert_close(value, torch.softmax(inner @ model.p, 0) @ (inner @ model.v))


def test_posterior_difference_by_hand():
    corpus = Corpus(torch.tensor([[0, 1, 1], [0, 0, -1]]), torch.tensor([1.0, -1.0]), 3)
    difference, counts = posterior_difference(corpus)
    assert counts.tolist() == [3, 2, 0]
    torch.testing.assert_close(difference, torch.tensor([-1 / 3, 1.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(signed_frequency(corpus), torch.tensor([-1 / 6, 2 / 6, 0.0], dtype=torch.float64))


def test_spearman_with_ties():
    x = torch.tensor([1.0, 2.0, 2.0, 3.0])
    assert spearman(x, -x) == pytest.approx(-1.0)
    assert spearman(x, torch.tensor([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.9486833, abs=1e-6)


# ------------------------------------------------------------------------------------------------ reviews
def test_words():
    assert tokens_of("<br />The MOVIES weren't <i>loved</i>, the glass") == ["movi", "werent", "lov", "glass"]
    assert stem("is") == "is"


@pytest.mark.parametrize("packed", [False, True])
def test_imdb_files(tmp_path, packed):
    import lzma

    for part in ("train", "test"):
        rows = [{"id": i, "label": i % 2, "text": ("good film " if i % 2 else "bad film ") * 2} for i in range(20)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = tmp_path / f"imdb_{part}.jsonl"
        if packed:
            path.with_suffix(".jsonl.xz").write_bytes(lzma.compress(text.encode()))
        else:
            path.write_text(text)
    corpus, held_out = imdb(tmp_path, 10, 4, 3, 5, 0)
    assert corpus.words == ("bad", "film", "good")
    assert corpus.ids.shape == (10, 3)
    assert held_out.ids.shape == (4, 3)
    assert float(corpus.labels.sum()) == 0
    first = corpus.ids[:, 0]
    assert torch.equal(first == 2, corpus.labels > 0)


def test_imdb_without_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold imdb_train\.jsonl"):
        imdb(tmp_path, 10, 4, 3, 5, 0)


# ------------------------------------------------------------------------------------------------ the command
def test_the_whole_paper_at_its_smallest_size(tmp_path):
    pytest.importorskip("matplotlib")
    from samplex_cuda.reproduce import run_paper

    found = run_paper("attention", tmp_path, quick=True)
    theory_claims = [claim for claim in found.claims if claim["holds"] is not None]
    assert len(theory_claims) >= 11
    assert [claim["name"] for claim in theory_claims if not claim["holds"]] == []
    assert (tmp_path / "attention" / "headline.png").is_file()


@pytest.mark.slow
def test_the_whole_paper_at_its_default_size(tmp_path):
    pytest.importorskip("matplotlib")
    from samplex_cuda.reproduce import run_paper

    found = run_paper("attention", tmp_path)
    assert [claim["name"] for claim in found.claims if claim["holds"] is False] == []
