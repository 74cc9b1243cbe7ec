"""Keys with the number of the first row: some rows of a batch draw what they draw in the whole batch."""

from __future__ import annotations

import pytest
import torch
from static_cases import LAWS, make
from test_tree import make_tree

import samplex_cuda as sx
from samplex_cuda.reference import static_sample as reference
from samplex_cuda.rng import fold_in

ROWS, DRAWS, CLASSES, DIM = 70, 21, 13, 5
PARTS = (slice(0, 17), slice(17, 18), slice(18, 18), slice(18, 70))


def sampler_of(kind, device):
    if kind in LAWS:
        return make(kind, device=device)
    if kind == "mixture":
        return sx.samplers.Mixture([(make_tree(CLASSES, DIM), 1), (sx.samplers.LogUniform(CLASSES), 2)]).to(device)
    tree = make_tree(CLASSES, DIM)
    if kind == "tree with base":
        tree.set_base(sx.samplers.Unigram(torch.arange(CLASSES) + 1), 0.4)
    return tree.to(device)


def first_row(key, part, device):
    return torch.cat([key, torch.tensor([part.start])]).to(device)


@pytest.mark.parametrize("without", ["none", "one", "several"])
@pytest.mark.parametrize("kind", [*LAWS, "tree", "tree with base", "mixture"])
def test_some_rows_draw_as_in_the_whole_batch(backend, kind, without):
    sampler, g = sampler_of(kind, backend.device), torch.Generator().manual_seed(1)
    classes, key = sampler.num_classes, torch.tensor([3, 4])
    h = torch.randn(ROWS, DIM, generator=g).to(backend.device)
    exclude = None
    if without != "none":
        exclude = torch.randint(classes, (ROWS,) if without == "one" else (ROWS, 4), generator=g).to(backend.device)
    whole = sampler.sample(h, DRAWS, key=key.to(backend.device), exclude=exclude)
    for part in PARTS:
        mine = None if exclude is None else exclude[part].contiguous()
        draw = sampler.sample(h[part], DRAWS, key=first_row(key, part, backend.device), exclude=mine)
        assert torch.equal(draw.ids, whole.ids[part])
        if kind == "mixture":  # torch rounds a logsumexp of other shapes differently
            torch.testing.assert_close(draw.log_q, whole.log_q[part], rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(draw.log_q, whole.log_q[part])
    assert not torch.equal(whole.ids[:17], whole.ids[18:35])


@pytest.mark.parametrize("kind", ["uniform", "tree", "tree with base"])
def test_on_each_instruction_set(simd_level, kind):
    sampler, key = sampler_of(kind, "cpu"), torch.tensor([3, 4])
    h = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    whole = sampler.sample(h, DRAWS, key=key)
    for part in PARTS:
        assert torch.equal(sampler.sample(h[part], DRAWS, key=first_row(key, part, "cpu")).ids, whole.ids[part])


def test_draws_that_are_scored_too(backend):
    """The projection, the draw and the scores of a tree in one op."""
    plain = make_tree(CLASSES, DIM)
    projected = {"mean": torch.zeros(7), "projection": torch.eye(7)[:, :DIM]}
    tree = sx.samplers.Tree(*plain.parameters_of_nodes(), plain.leaf_class, **projected).to(backend.device)
    g, key = torch.Generator().manual_seed(2), torch.tensor([3, 4])
    h, y = torch.randn(ROWS, 7, generator=g), torch.randint(CLASSES, (ROWS,), generator=g)
    h, y = h.to(backend.device), y.to(backend.device)
    whole, scores = tree.sample_and_score(h, DRAWS, y, key=key.to(backend.device))
    for part in PARTS:
        draw, mine = tree.sample_and_score(h[part], DRAWS, y[part], key=first_row(key, part, backend.device))
        assert torch.equal(draw.ids, whole.ids[part])
        assert torch.equal(mine, scores[part])


@pytest.mark.parametrize("first", [0, 5, (1 << 32) - 2])
@pytest.mark.parametrize("law", LAWS)
def test_rows_are_those_of_the_reference(backend, law, first):
    """Modulo 2^32, as the rows of the generator's counter."""
    sampler = make(law, device=backend.device)
    key = torch.tensor([7, 8, first], device=backend.device)
    draw = sampler.sample(None, 9, batch_size=4, key=key)
    weights = {"uniform": torch.ones(sampler.num_classes).numpy()}.get(law)
    if law == "log_uniform":
        weights = reference.log_uniform_weights(sampler.num_classes)
    table = None
    if law == "alias":
        weights, table = reference.alias_weights(sampler.prefix.cpu().numpy()), sampler.table.cpu().numpy()
    wanted, _ = reference.sample(law, weights, (7, 8), 4, 9, None, table, first)
    assert draw.ids.cpu().tolist() == wanted.tolist()


def test_distinct_draws_and_folded_keys_keep_their_rows():
    sampler, key = sx.samplers.LogUniform(40), torch.tensor([3, 4])
    whole = sampler.unique(6, batch_size=ROWS, key=key)
    for part in PARTS:
        some = sampler.unique(6, batch_size=part.stop - part.start, key=first_row(key, part, "cpu"))
        assert torch.equal(some.draw.ids, whole.draw.ids[part])
        assert torch.equal(some.level, whole.level[part])
    folded = fold_in(torch.tensor([3, 4, 5]), 1)
    assert folded.tolist() == [*fold_in(key, 1).tolist(), 5]


def test_other_samplers_refuse_a_row():
    key = torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match=r"midx_sample: key must be \[2\]"):
        sx.samplers.MIDX(torch.randn(20, 4), num_codes=3).sample(torch.randn(2, 4), 3, key=key)
    with pytest.raises(ValueError, match=r"x: key must be \[2\] or \[3\] int64, got \[4\] int64"):
        sx.rng.key_tensor("x", torch.zeros(4, dtype=torch.int64), torch.device("cpu"))
