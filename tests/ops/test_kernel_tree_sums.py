"""The sums of the kernel tree: built, updated, by threads, their drift."""

# ruff: noqa: E501  (tables of messages)

from __future__ import annotations

import pytest
import torch
from kernel_tree_cases import SHAPES

from samplex_cuda.ops import kernel_tree as ops
from samplex_cuda.reference import kernel_tree as reference


@pytest.mark.parametrize("width", [16, 48, 160])
@pytest.mark.parametrize(("classes", "leaf_size"), SHAPES)
def test_build_is_the_sum(backend, classes, leaf_size, width):
    phi = torch.randn(classes, width)
    want = reference.node_sums(phi, leaf_size)
    sums = torch.full(want.shape, 7.0, device=backend.device)
    sums[want.shape[0] // 2 :] = 0
    sums[0] = 0
    step = max(1, classes // 3 // leaf_size) * leaf_size
    for begin in range(0, classes, step):
        ops.kernel_tree_build(sums, phi[begin : begin + step].to(backend.device), begin, leaf_size)
    ops.kernel_tree_parents(sums)
    torch.testing.assert_close(sums.cpu().double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("classes", "leaf_size"), SHAPES)
def test_update_is_a_build(backend, classes, leaf_size):
    phi, new = torch.randn(classes, 32), torch.randn(classes, 32)
    sums = reference.node_sums(phi, leaf_size).float().to(backend.device)
    ids = torch.randperm(classes)[: max(1, classes // 3)].sort().values
    old = phi[ids].clone()
    before = sums.clone()
    phi[ids] = new[ids]
    ops.kernel_tree_update(*(t.to(backend.device) for t in (sums, new[ids], old, ids)), leaf_size)
    ops.kernel_tree_parents(sums, (ids // leaf_size).to(backend.device))
    torch.testing.assert_close(sums.cpu().double(), reference.node_sums(phi, leaf_size), rtol=1e-5, atol=1e-5)
    leaves = sums.shape[0] // 2
    touched = set()
    for node in (leaves + ids // leaf_size).tolist():
        while node:
            touched.add(node)
            node //= 2
    rest = [i for i in range(2 * leaves) if i not in touched]
    assert torch.equal(sums[rest], before[rest])


@pytest.mark.parametrize(("classes", "leaf_size"), SHAPES)
def test_update_skips_and_writes_rows(backend, classes, leaf_size):
    """-1 and entries that are not taken change nothing; rows and the largest sums of the leaves come along."""
    phi, new, rows, fresh = (torch.randn(classes, width) for width in (32, 32, 8, 8))
    want_sums = reference.node_sums(phi, leaf_size).float()
    leaves = want_sums.shape[0] // 2
    found = torch.randperm(classes)[: max(1, classes // 2)].sort().values
    ids = torch.cat([torch.full((5,), -1), found])
    at = ids.clamp_min(0)
    taken = torch.rand(ids.shape[0]) < 0.6
    taken[:3] = True  # an id of -1 is none, taken or not
    peaks = torch.full((2, leaves + 1), 0.5)
    sums, rows_now, peaks_now = (t.clone().to(backend.device) for t in (want_sums, rows, peaks))
    ops.kernel_tree_update(
        *(t.to(backend.device) for t in (sums, new[at], phi[at], ids)),
        leaf_size,
        taken=taken.to(backend.device),
        rows=rows_now,
        fresh=fresh[at].to(backend.device),
        peaks=peaks_now,
    )
    ops.kernel_tree_parents(sums, (ids // leaf_size).to(backend.device))
    used = ids[taken & (ids >= 0)]
    phi[used], rows[used] = new[used], fresh[used]
    torch.testing.assert_close(sums.cpu().double(), reference.node_sums(phi, leaf_size), rtol=1e-5, atol=1e-5)
    assert torch.equal(rows_now.cpu(), rows)
    touched = (found // leaf_size).unique()
    peaks[0, touched] = sums.cpu()[leaves + touched].abs().amax(1)
    peaks[1] = torch.maximum(peaks[0], peaks[1])
    assert torch.equal(peaks_now.cpu(), peaks)
    before = sums.clone()
    nothing = torch.full((3,), -1, device=backend.device)
    some = torch.randn(3, 32, device=backend.device)
    ops.kernel_tree_update(sums, some, some + 1, nothing, leaf_size)
    ops.kernel_tree_parents(sums, nothing)
    assert torch.equal(sums, before)


def test_threads_share_an_update_by_leaves():
    """Rows so long that a thread takes two at a time: the classes of a leaf then lie in the parts of several threads."""
    phi, new = torch.randn(40, 32768), torch.randn(40, 32768)
    for leaf_size in (5, 20):
        sums = reference.node_sums(phi, leaf_size).float()
        ids = torch.tensor([i for i in range(40) if i % 7])
        changed = phi.clone()
        changed[ids] = new[ids]
        ops.kernel_tree_update(sums, new[ids], phi[ids], ids, leaf_size)
        ops.kernel_tree_parents(sums, ids // leaf_size)
        torch.testing.assert_close(sums.double(), reference.node_sums(changed, leaf_size), rtol=1e-5, atol=2e-5)


def test_drift_is_bounded(backend):
    """200 updates: the leaf adds up rounding errors, the nodes above do not multiply them."""
    rounds = 20 if backend.emulated else 200
    g = torch.Generator().manual_seed(0)
    phi = torch.randn(40, 16, generator=g)
    sums = reference.node_sums(phi, 2).float().to(backend.device)
    for _ in range(rounds):
        ids = torch.randperm(40, generator=g)[:9].sort().values
        new = torch.randn(9, 16, generator=g)
        ops.kernel_tree_update(*(t.to(backend.device) for t in (sums, new, phi[ids], ids)), 2)
        ops.kernel_tree_parents(sums, (ids // 2).to(backend.device))
        phi[ids] = new
    error = (sums.cpu().double() - reference.node_sums(phi, 2)).abs()
    # A leaf sees about rounds / 2 additions, each off by half an ulp of a number below 16.
    assert error[32:].max() < rounds * 2.0**-21
    assert error.max() < 8 * rounds * 2.0**-21
