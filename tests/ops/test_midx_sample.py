"""midx_sample and midx_log_prob: reference, exclusion, determinism, corner cases, errors, opcheck."""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_cuda.ops import midx_sample as ops
from samplex_cuda.ops.static_sample import sort_exclude
from samplex_cuda.reference import midx_sample as reference

KEY = (0x1234_5678_9ABC, 77)
C, K, B = 300, 37, 5  # 37 codes: lanes of two codes and of one


def tables(device="cpu", weighted=True, codes=K, classes=C, batch=B, spread=2.0):
    """Everything the ops take. Cells of no, one and many classes; units from 0 to nearly all the mass."""
    g = torch.Generator().manual_seed(codes)
    cell = (torch.randint(codes, (classes,), generator=g) ** 2 // codes * codes).to(torch.int32)
    cell += torch.randint(codes, (classes,), generator=g).to(torch.int32)
    cell[: classes // 4] = cell[0]  # one cell with a quarter of the classes
    units = torch.ones(classes, dtype=torch.int64)
    if weighted:
        units = torch.randint(0, 50, (classes,), generator=g)
        units[3], units[classes // 2] = 10**14, 0
    place, members, starts = ops.midx_tables(cell, codes)
    prefix = torch.cat([torch.zeros(1, dtype=torch.int64), units[members.long()].cumsum(0)]) if weighted else None
    sums = torch.zeros(codes * codes, dtype=torch.float64).index_add_(0, cell.long(), units.double())
    omega = (sums / max(1.0, float(units.max()))).float().view(codes, codes)
    weights = (torch.randn(batch, 2, codes, generator=g) * spread).exp()
    mass = (weights[:, 1].double() @ omega.T.double()).float()
    made = [weights, mass, omega, cell, place, members, starts, prefix]
    return [t if t is None else t.to(device) for t in made], units


def row_law(made, units, row, excluded, epsilon):
    weights, omega, cell = (made[i].cpu().numpy() for i in (0, 2, 3))
    return reference.law(weights[row, 0], weights[row, 1], omega, cell, units.numpy(), epsilon, excluded)


def key_on(device):
    return torch.tensor(KEY, dtype=torch.int64, device=device)


EXCLUDES = {
    "none": [[]] * B,
    "target": [[3], [0], [150], [299], [17]],  # 3: nearly all units; 150: none
    "several": [[3, 4, 5, 3], [0, 1, 2, 200], [], list(range(0, 80)), [299, 298]],
    "nothing left": [list(range(C)), list(range(C - 1)), [7], [8], list(range(1, C))],
}


def forms(rows, device):
    width = max(len(row) for row in rows)
    padded = torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int64)
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    flat = torch.tensor([k for row in rows for k in row], dtype=torch.int64)
    padded_form, csr = sort_exclude(padded), sort_exclude((offsets, flat))
    return [tuple(None if t is None else t.to(device) for t in form) for form in (padded_form, csr)]


# ------------------------------------------------------------------------------------------------ reference
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", EXCLUDES)
def test_log_prob_equals_the_enumerated_law(backend, name, weighted):
    made, units = tables(backend.device, weighted)
    rows = EXCLUDES[name]
    every = torch.arange(C, device=backend.device).expand(B, -1).contiguous()
    for epsilon in (0.0, 0.1):
        want = np.stack([row_law(made, units, b, rows[b], epsilon) for b in range(B)])
        for lists in forms(rows, backend.device):
            got = ops.midx_log_prob(every, *made, epsilon, *lists).double().exp().cpu().numpy()
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-30)
            np.testing.assert_array_equal(got == 0, want == 0)


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", EXCLUDES)
def test_draws_equal_the_reference(backend, name, weighted, stratified):
    """Every id, unless its uniform number is within rounding of a boundary between two classes."""
    made, units = tables(backend.device, weighted)
    weights, omega, cell = (made[i].cpu().numpy() for i in (0, 2, 3))
    rows, m = EXCLUDES[name], 40
    for epsilon in (0.0, 0.1):
        for lists in forms(rows, backend.device):
            ids, log_q = ops.midx_sample(key_on(backend.device), m, *made, epsilon, stratified, *lists)
            assert torch.equal(ops.midx_log_prob(ids, *made, epsilon, *lists), log_q)
            for b in range(B):
                want, want_log_q, near = reference.sample(
                    weights[b, 0], weights[b, 1], omega, cell, units.numpy(), epsilon, KEY, b, m, rows[b], stratified
                )
                sure = near > 2e-6
                assert sure.sum() > 0.9 * m
                np.testing.assert_array_equal(ids[b].cpu().numpy()[sure], want[sure])
                np.testing.assert_allclose(log_q[b].cpu().numpy()[sure], want_log_q[sure], rtol=1e-5, atol=2e-5)


def test_exclusion_does_not_cancel(backend):
    """Class 3 has all but 1e-12 of its cell: a difference of floating-point sums has lost the rest."""
    made, units = tables(backend.device, True)
    near = [k for k in range(75) if k != 3]  # the classes of its cell
    ids = torch.tensor([near] * B, device=backend.device)
    gone = [[k for k in range(C) if made[3][k] != made[3][3] or k == 3]] * B
    got = ops.midx_log_prob(ids, *made, 0.0, *forms(gone, backend.device)[0]).double().exp().cpu().numpy()
    want = units[near].double().numpy() / float(units[near].sum())
    np.testing.assert_allclose(got, np.tile(want, (B, 1)), rtol=1e-6)


# ------------------------------------------------------------------------------------------------ same bits
@pytest.mark.parametrize("codes", [1, 31, 32, 64, 100])
def test_every_backend_gives_the_same_bits(backend, codes):
    for weighted in (False, True):
        made, _ = tables(backend.device, weighted, codes)
        lists = forms(EXCLUDES["several"], backend.device)[1]
        got = [
            *ops.midx_sample(key_on(backend.device), 70, *made, 0.05),
            *ops.midx_sample(key_on(backend.device), 70, *made, 0.05, True, *lists),
        ]
        before = _native.cpu_backend()
        _native.set_cpu_backend("cpu")
        try:
            here = [None if t is None else t.cpu() for t in made]
            lists = [t.cpu() for t in lists]
            want = [
                *ops.midx_sample(key_on("cpu"), 70, *here, 0.05),
                *ops.midx_sample(key_on("cpu"), 70, *here, 0.05, True, *lists),
            ]
        finally:
            _native.set_cpu_backend(before)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu(), b)


def test_simd_levels_and_threads_agree(simd_level):
    before, level = torch.get_num_threads(), _native.simd_level()
    made, _ = tables(weighted=True, codes=100, batch=9)
    exclude = torch.tensor([[3, 4]] * 9)
    results = []
    try:
        for threads, isa in ((1, "scalar"), (2, level)):
            torch.set_num_threads(threads)
            _native.set_simd_level(isa)
            results.append(ops.midx_sample(key_on("cpu"), 600, *made, 0.01, False, exclude))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_draws_do_not_depend_on_batch_or_count(backend):
    made, _ = tables(backend.device)
    large = ops.midx_sample(key_on(backend.device), 300, *made, 0.1)
    some = [t[:2].contiguous() if i < 2 else t for i, t in enumerate(made)]
    small = ops.midx_sample(key_on(backend.device), 7, *some, 0.1)
    assert torch.equal(large[0][:2, :7], small[0])


# ------------------------------------------------------------------------------------------------ corner cases
@pytest.mark.parametrize(("batch", "m"), [(0, 5), (4, 0), (0, 0)])
@pytest.mark.parametrize("excluding", [False, True])
def test_empty(backend, batch, m, excluding):
    made, _ = tables(backend.device, batch=batch)
    exclude = torch.zeros(batch, 1, dtype=torch.int64, device=backend.device) if excluding else None
    ids, log_q = ops.midx_sample(key_on(backend.device), m, *made, 0.1, False, exclude)
    assert ids.shape == log_q.shape == (batch, m)
    assert ops.midx_log_prob(ids, *made, 0.1, exclude).shape == (batch, m)


def test_nan_stays_in_its_row(backend):
    made, _ = tables(backend.device)
    want = ops.midx_sample(key_on(backend.device), 9, *made, 0.1)
    made[0][2, 1, 5] = torch.nan
    made[1][2] = torch.nan
    for exclude in (None, torch.full((B, 1), 7, device=backend.device)):
        ids, log_q = ops.midx_sample(key_on(backend.device), 9, *made, 0.1, False, exclude)
        assert log_q[2].isnan().all()
        assert ((ids >= 0) & (ids < C)).all()
        assert log_q[[0, 1, 3, 4]].isfinite().all()
        if exclude is None:
            assert torch.equal(ids[[0, 1, 3, 4]], want[0][[0, 1, 3, 4]])


def test_stratified_draws_take_one_from_each_part(backend):
    """A class comes within one of m q times."""
    made, units = tables(backend.device, spread=0.5)
    m = 500
    ids, _ = ops.midx_sample(key_on(backend.device), m, *made, 0.0, True)
    for b in range(B):
        q = row_law(made, units, b, [], 0.0)
        seen = np.bincount(ids[b].cpu().numpy(), minlength=C)
        assert np.abs(seen - m * q).max() < 2.0


def test_damaged_tables_stay_inside(backend):
    """Indices outside of the tables give class 0 or another class, and nan; nothing is read outside."""
    for name, value in (("cell", -5), ("cell", 1 << 30), ("starts", 1 << 30), ("members", -1), ("place", 1 << 30)):
        made, _ = tables(backend.device)
        made[{"cell": 3, "place": 4, "members": 5, "starts": 6}[name]][1::2] = value
        lists = forms(EXCLUDES["several"], backend.device)[0]
        ids, _ = ops.midx_sample(key_on(backend.device), 30, *made, 0.1, False, *lists)
        assert ((ids >= 0) & (ids < C)).all()


def test_opcheck(backend):
    made, _ = tables(backend.device)
    exclude = torch.tensor([[3]] * B, device=backend.device)
    names = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.samplex.midx_sample, (key_on(backend.device), 5, *made, 0.1, True, exclude), test_utils=names
    )
    torch.library.opcheck(torch.ops.samplex.midx_log_prob, (exclude, *made, 0.1, exclude), test_utils=names)


def test_errors():
    made, _ = tables()
    ids = torch.zeros(B, 1, dtype=torch.int64)

    def changed(at, t):
        return [*made[:at], t, *made[at + 1 :]]

    sample, log_prob = torch.ops.samplex.midx_sample, torch.ops.samplex.midx_log_prob
    for call, text in [
        (lambda: sample(key_on("cpu").float(), 1, *made, 0.1), r"midx_sample: key must be \[2\] = \[2\] int64"),
        (lambda: sample(key_on("cpu"), -1, *made, 0.1), r"midx_sample: num_samples must be in \[0, 2\^24\], got -1"),
        (lambda: sample(key_on("cpu"), 1, *made, 1.5), r"midx_sample: epsilon must be in \[0, 1\], got 1.5"),
        (lambda: sample(key_on("cpu"), 1, *changed(0, made[0].double()), 0.1), r"weights must be \[B, 2, K\]"),
        (lambda: sample(key_on("cpu"), 1, *changed(1, made[1][:2]), 0.1), r"mass must be \[B, K\] = \[5, 37\]"),
        (lambda: sample(key_on("cpu"), 1, *changed(2, made[2][:2]), 0.1), r"omega must be \[K, K\] = \[37, 37\]"),
        (lambda: sample(key_on("cpu"), 1, *changed(3, made[3].long()), 0.1), r"cell must be \[C\] .* int32"),
        (lambda: sample(key_on("cpu"), 1, *changed(6, made[6][1:]), 0.1), r"starts must be \[K \* K \+ 1\] = \[1370\]"),
        (lambda: sample(key_on("cpu"), 1, *changed(7, made[7][1:]), 0.1), r"prefix must be \[C \+ 1\] = \[301\]"),
        (lambda: sample(key_on("cpu"), 1, *made, 0.1, False, ids + C), r"exclude must be -1 or in \[0, 300\), got 300"),
        (lambda: log_prob(ids + C, *made, 0.1), r"IndexError: midx_log_prob: ids must be in \[0, 300\), got 300"),
        (lambda: log_prob(ids[:2], *made, 0.1), r"midx_log_prob: ids must be \[B, n\] with B = 5, got \[2, 1\]"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            call()
    large = torch.zeros(1, 2, 2049)
    with pytest.raises(RuntimeError, match=r"weights must have K in \[1, 2048\] codes"):
        sample(key_on("cpu"), 1, *changed(0, large), 0.1)


def test_the_index_follows_the_softmax(cpu):
    """More codes, and the sampler is closer to the softmax; with a code for each class it is the softmax."""
    g = torch.Generator().manual_seed(0)
    weight, h = torch.randn(200, 8, generator=g), torch.randn(6, 8, generator=g) * 0.5
    want = (h @ weight.T).softmax(1)
    found = []
    for codes in (1, 8, 32, 200):
        sampler = sx.samplers.MIDX(weight, codes, epsilon=0.0, key=sx.Key(1))
        found.append(float((sampler.log_prob_all(h).exp() - want).abs().sum(1).mean()) / 2)
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1e-5


@pytest.mark.parametrize("module", ["ops.midx_sample", "samplers.midx", "samplers.kmeans", "reference.midx_sample"])
def test_examples(module):
    result = doctest.testmod(importlib.import_module(f"samplex_cuda.{module}"))
    assert result.failed == 0
    assert result.attempted > 0
