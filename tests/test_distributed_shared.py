"""Shared draws of a sharded head: each rank multiplies its own rows, and the bits do not depend on the ranks."""

from __future__ import annotations

import pytest
import torch

from samplex_cuda.distributed import Layout, step
from samplex_cuda.distributed.step import Coefficients, _in_tiles, entries_of, logits_of, own_tiles, partial_hidden


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("rows", "draws", "dim", "dtype"),
    [
        (256, 64, 128, torch.float32),
        (7, 300, 20, torch.float32),
        (1, 5, 3, torch.float32),
        (64, 1500, 33, torch.float64),
        (130, 257, 64, torch.bfloat16),
        (1024, 40, 256, torch.float32),
    ],
)
@pytest.mark.parametrize("order", ["class", "spread"])
def test_products_of_shared_draws_have_the_same_bits_on_any_number_of_ranks(rows, draws, dim, dtype, order, threads):
    classes, g = 977, torch.Generator().manual_seed(rows)
    h = torch.randn(rows, dim, generator=g).to(dtype)
    weight, bias = torch.randn(classes, dim, generator=g).to(dtype), torch.randn(classes, generator=g).to(dtype)
    ids, target = torch.randint(classes, (draws,), generator=g), torch.randint(classes, (rows, 1), generator=g)
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    coefs = Coefficients(
        torch.zeros(()), torch.randn(rows, 1, generator=g).to(acc), torch.randn(rows, draws, generator=g).to(acc), None
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = {}
        for world in (1, 2, 3, 4):
            logits, hidden = torch.zeros(rows, 1 + draws, dtype=acc), torch.zeros(rows, dim, dtype=acc)
            tables, of_bias = torch.zeros(draws, dim, dtype=acc), torch.zeros(draws, dtype=acc)
            for rank in range(world):
                layout = Layout(classes, world, rank, order)
                mine = layout.classes()
                part, at_target, at_draws = logits_of(h, weight[mine], bias[mine], target, ids, layout)
                logits += part
                hidden += partial_hidden(weight[mine], coefs, at_target, at_draws)
                e = entries_of(coefs, h, at_target, at_draws, True)
                mine = e.ids_b >= 0
                if _in_tiles(h.to(acc), ids):
                    assert torch.equal(e.ids_b, at_draws[at_draws >= 0])  # no foreign row is multiplied
                tables[at_draws >= 0], of_bias[at_draws >= 0] = e.rows_b[mine], e.bias_b[mine]
            found[world] = (logits, tables, of_bias, hidden)
    finally:
        torch.set_num_threads(before)
    wide = weight.to(acc)
    torch.testing.assert_close(found[1][0][:, 1:], h.to(acc) @ wide[ids].t() + bias[ids].to(acc), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1][1], coefs.draws.t() @ h.to(acc), rtol=1e-4, atol=1e-3)
    for world in (2, 3, 4):
        for mine, one in zip(found[world][:3], found[1], strict=False):
            assert torch.equal(mine, one)
        torch.testing.assert_close(found[world][3], found[1][3], rtol=1e-4, atol=1e-3)


def test_a_product_whose_bits_depend_on_the_place_is_made_as_a_whole(monkeypatch):
    monkeypatch.setattr(step, "_keep_bits", lambda *_: False)
    h, weight, ids = torch.randn(5, 4), torch.randn(10, 4), torch.tensor([9, 2, 7])
    layout = Layout(20, 2, 1)
    _, _, at_draws = logits_of(h, weight, None, ids.new_full((5, 1), 19), ids + 9, layout)
    coefs = Coefficients(torch.zeros(()), torch.ones(5, 1), torch.ones(5, 3), None)
    assert entries_of(coefs, h, ids.new_full((5, 1), -1), at_draws, False).ids_b.tolist() == at_draws.tolist()


def test_tiles_cover_the_own_draws_once():
    local = torch.tensor([3, -1, 0, 5, -1] * 40)
    tiles = list(own_tiles(local))
    assert torch.equal(torch.cat([at for at, _ in tiles]), (local >= 0).nonzero().squeeze(1))
    assert len({some.shape[0] for _, some in tiles}) == 1
    assert len(tiles) == 4  # 120 of 200 draws in tiles of 32
