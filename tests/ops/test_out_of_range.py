"""Ids out of range on a device, where no host looks at them: nan in that row, no access outside a table.

The harness reports an access outside a tensor, and so does an emulated CUDA runtime: a call without the compare fails.
"""

from __future__ import annotations

import copy
import itertools

import entry_cases
import pytest
import softmax_cases
import torch
from loss_cases import run_ours

from samplex_cuda import _native, functional, losses, prediction
from samplex_cuda.prediction import softmax_sums

CLASSES, ROW = 40, 2
BAD = [-1, -7, CLASSES, 1 << 40, -(1 << 62), (1 << 63) - 1]
ops = torch.ops.samplex


@pytest.fixture
def device(backend):
    """The device of the tensors; on a backend that emulates one, ids are left to the kernels."""
    if backend.name == "cpu":
        pytest.skip("on the CPU the host refuses a bad id")
    if backend.emulated:
        _native.set_device_ids(True)
    yield backend.device
    if backend.emulated:
        _native.set_device_ids(False)


def spoiled(case, field: str, value: int):
    """The case with one bad id in row ROW, or in the shared draws."""
    bad = copy.copy(case)
    ids = getattr(case, field).clone()
    ids[ROW if field == "target" or ids.dim() == 2 else 1].view(-1)[-1 if ids.dim() == 2 else 0] = value
    setattr(bad, field, ids)
    return bad


def check_row_is_nan(case, field: str, value: int, device: torch.device) -> None:
    """Loss and gradient of the bad row are nan; those of the others are what they were, bit for bit."""
    good, bad = run_ours(case, device), run_ours(spoiled(case, field, value), device)
    all_rows = field == "ids" and case.ids.dim() == 1
    for name in ("loss", "lse", "d_h"):
        if name not in good:
            continue
        if all_rows:
            assert bad[name].isnan().all(), name
            continue
        assert bad[name][ROW].isnan().all(), name
        kept = torch.arange(good[name].shape[0]) != ROW
        assert torch.equal(bad[name][kept], good[name][kept]), name


SOFTMAX = [
    {}, {"dim": 5}, {"dim": 64, "samples": 150}, {"dim": 516}, {"dim": 768}, {"dim": 300, "dtype": torch.float64},
    {"bias": "own"}, {"class_weight": True, "bias": "own"}, {"smoothing": 0.1, "class_weight": True},
    {"targets": 3, "smoothing": 0.1}, {"targets": 2, "positives": True}, {"absolute": True},
    {"dtype": torch.bfloat16, "dim": 24}, {"shared": True}, {"shared": True, "dtype": torch.float64, "smoothing": 0.1},
    {"shared": True, "dtype": torch.float16, "class_weight": True, "dim": 520},
]  # fmt: skip


@pytest.mark.parametrize("field", ["target", "ids"])
@pytest.mark.parametrize("options", SOFTMAX, ids=str)
def test_sampled_softmax(options, field, device):
    for value in BAD if not options else BAD[1:4]:
        check_row_is_nan(softmax_cases.make_case(**options), field, value, device)


@pytest.mark.parametrize("loss", entry_cases.LOSSES)
@pytest.mark.parametrize("options", [
    {}, {"dim": 5}, {"targets": 3, "class_weight": True}, {"positives": True, "bias": "own"}, {"dim": 1040},
    {"dim": 1040, "class_weight": True}, {"dtype": torch.float64}, {"dtype": torch.bfloat16, "dim": 24},
    {"shared": True, "class_weight": True}, {"shared": True, "dtype": torch.float16},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("field", ["target", "ids"])
def test_entry_losses(loss, options, field, device):
    for value in BAD if not options else BAD[1:3]:
        check_row_is_nan(entry_cases.make_case(loss=loss, **options), field, value, device)


@pytest.mark.parametrize("module", [softmax_cases, entry_cases], ids=["softmax", "negative_sampling"])
def test_offsets_of_known_positives_out_of_range(module, device):
    """They mask what they can; nothing outside of the list is read."""
    case = module.make_case(positives=True)
    offsets, known = case.options["positives"]
    for wrong in ([-3, 1 << 40], [1 << 40, -5], [len(known), len(known) + 9]):
        bad, inside = copy.copy(case), copy.copy(case)
        places = offsets.clone()
        places[ROW : ROW + 2] = torch.tensor(wrong)
        bad.options = {**case.options, "positives": (places, known)}
        ends = places.clamp(0, len(known)).tolist()
        rows = [known[begin:end] for begin, end in itertools.pairwise(ends)]
        sizes = torch.tensor([0, *(len(row) for row in rows)])
        inside.options = {**case.options, "positives": (sizes.cumsum(0), torch.cat(rows))}
        assert torch.equal(run_ours(bad, device)["loss"], run_ours(inside, device)["loss"])


@pytest.mark.parametrize("module", [softmax_cases, entry_cases], ids=["softmax", "one_vs_each"])
def test_a_bad_target_shows_without_draws(module, device):
    """Such a row has loss 0 where its target is a class."""
    more = {"loss": "one_vs_each"} if module is entry_cases else {}
    for options in ({}, {"targets": 2}, {"dtype": torch.float64}):
        case = module.make_case(samples=0, **options, **more)
        assert run_ours(case, device)["loss"].eq(0).all()
        loss = run_ours(spoiled(case, "target", CLASSES), device)["loss"]
        assert loss[ROW].isnan()
        assert loss[torch.arange(5) != ROW].eq(0).all()


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (8, torch.float32),
        (5, torch.float32),
        (24, torch.bfloat16),
        (516, torch.float32),
        (800, torch.float32),
        (8, torch.float64),
    ],
)
def test_attention_pool(dim, dtype, device):
    g = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    table = torch.randn(CLASSES, dim, generator=g).to(device, dtype).requires_grad_()
    query, value = (torch.randn(dim, generator=g).to(device, wide).requires_grad_() for _ in range(2))
    ids = torch.randint(0, CLASSES, (4, 9), generator=g)
    ids[1, 3], ids[ROW, 5] = -1, -100
    good = functional.attention_pool(ids.to(device), table, query, value)
    for bad_id in (-2, *BAD[1:]):
        ids[ROW, 4] = bad_id
        pooled = functional.attention_pool(ids.to(device), table, query, value)
        assert pooled[ROW].isnan()
        kept = torch.arange(4) != ROW
        assert torch.equal(pooled[kept], good[kept])
        pooled[kept.to(device)].sum().backward()


@pytest.mark.parametrize("value", BAD)
def test_rows_of_no_class_are_left_out(value, device):
    """Of an update or a sum by class: there is no row to be nan."""
    rows = torch.randn(3, 4, device=device)
    ids = torch.tensor([3, value, 3], device=device)
    none = torch.empty(0, dtype=torch.int64, device=device), None, torch.empty(0, 4, device=device)
    row_ids, sums, _, count = ops.row_reduce(ids, None, rows, *none, CLASSES, False)
    assert count.tolist() == [1]
    assert row_ids[0] == 3
    assert torch.equal(sums[0], rows[0] + rows[2])
    weight = torch.zeros(CLASSES, 4, device=device)
    rule = [0.0, 0.0, 1.0, *[0.0] * 6]
    ops.row_apply_(weight, None, None, ids[:2].contiguous(), rows[:2].contiguous(), None, None, rule)
    assert weight.nonzero()[:, 0].unique().tolist() == [3]


def kernel_tree(device, classes=11, leaf=2):
    leaves = 8
    g = torch.Generator().manual_seed(2)
    rows, phi = torch.rand(classes, 8, generator=g), torch.rand(classes, 16, generator=g)
    sums = torch.zeros(2 * leaves, 16)
    for i in range(classes):
        sums[leaves + i // leaf] += phi[i]
    for node in range(leaves - 1, 0, -1):
        sums[node] = sums[2 * node] + sums[2 * node + 1]
    h, query = torch.rand(3, 8, generator=g), torch.rand(3, 16, generator=g)
    return [t.to(device) for t in (h, query, rows, sums)]


@pytest.mark.parametrize("value", [-5, 11, 16, 1 << 40, -(1 << 62)])
def test_kernel_tree(value, device):
    h, phi, rows, sums = kernel_tree(device)
    law = (2, 0, 1.0, 0.1)
    ids = torch.tensor([[0, value], [1, 2], [3, 4]], device=device)
    log_q = ops.kernel_tree_log_prob(h, phi, ids, rows, sums, *law)
    assert log_q.isnan().tolist() == [[False, True], [False, False], [False, False]]
    # Excluded classes that do not ascend: whatever the draws are, they are classes.
    exclude = torch.tensor([[3, value, 2, 2]] * 3, device=device)
    for seed in range(4):
        drawn, _, _ = ops.kernel_tree_sample(
            torch.tensor([seed, 0], device=device), h, phi, rows, sums, *law, 9, exclude
        )
        assert ((drawn >= 0) & (drawn < 11)).all()
    before = sums.clone()
    delta = torch.ones(1, 16, device=device)
    if value >= 16 or value < 0:
        ops.kernel_tree_update(sums, delta, torch.zeros_like(delta), torch.tensor([value], device=device), 2)
        ops.kernel_tree_parents(sums, torch.tensor([value], device=device))
        assert torch.equal(sums, before)


@pytest.mark.parametrize("value", [-5, 8, 9, 1 << 40, -(1 << 62)])
def test_tree(value, device):
    from samplex_cuda.samplers import Tree

    tree = Tree.fit(torch.randn(60, 4), torch.randint(0, 5, (60,)), num_classes=5, dim=3, progress=False)
    x = torch.randn(3, 3, device=device)
    table = [getattr(tree, name).to(device) for name in ("nodes", "leaf_class", "class_leaf")]
    ids = torch.tensor([[0, value], [1, 2], [3, 4]], device=device)
    assert ops.tree_log_prob(x, ids, *table, None, None).isnan().sum() == 1
    exclude = torch.tensor([[3, value, 2]] * 3, device=device)
    for seed in range(3):
        drawn, _ = ops.tree_sample(torch.tensor([seed, 0], device=device), x, *table, 7, exclude, None)
        assert ((drawn >= 0) & (drawn < 5)).all()
    shared = ops.tree_log_prob_shared(x, torch.tensor([value, 1], device=device), *table)
    assert shared.isnan().tolist() == [True, False]


@pytest.mark.parametrize("value", BAD)
def test_full_softmax(value, device):
    h, weight = torch.randn(3, 8, device=device), torch.randn(CLASSES, 8, device=device)
    target = torch.tensor([[1], [value], [2]], device=device)
    _, positive, _ = softmax_sums(h, weight, target, chunk_size=16)
    assert positive.isnan().flatten().tolist() == [False, True, False]


@pytest.fixture
def unseen(device, monkeypatch):
    """The device, of which Python code does not look at numbers either."""
    monkeypatch.setattr("samplex_cuda._device.host_waits", lambda _: True)
    return device


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"class_weight": True}], ids=str)
def test_full_softmax_loss(options, value, unseen):
    """Loss and gradient of the row are nan, those of other rows what they were; the class weight is not read there."""
    g = torch.Generator().manual_seed(4)
    h, weight = torch.randn(4, 8, generator=g), torch.randn(CLASSES, 8, generator=g).to(unseen)
    if options.get("class_weight"):
        options = {"class_weight": torch.rand(CLASSES, generator=g).to(unseen)}
    got = []
    for target in ([1, 2, 3, 4], [1, 2, value, 4]):
        x = h.to(unseen).requires_grad_()
        loss = functional.full_softmax(
            x, weight, torch.tensor(target, device=unseen), reduction="none", chunk_size=16, **options
        )
        loss.sum().backward()
        got.append((loss.detach(), x.grad))
    kept = torch.arange(4) != ROW
    for good, bad in zip(*got, strict=True):
        assert bad[ROW].isnan().all()
        assert torch.equal(bad[kept], good[kept])


def test_a_bad_row_that_nobody_uses_spoils_no_gradient(unseen):
    h, weight = torch.randn(3, 8, device=unseen), torch.randn(CLASSES, 8, device=unseen).requires_grad_()
    loss = functional.full_softmax(h, weight, torch.tensor([1, CLASSES, 2], device=unseen), reduction="none")
    torch.where(loss.isnan(), 0.0, loss).sum().backward()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("value", BAD)
def test_exact_answers(value, unseen):
    h, weight = torch.randn(3, 8, device=unseen), torch.randn(CLASSES, 8, device=unseen)
    bias, cost = torch.randn(CLASSES, device=unseen), torch.rand(CLASSES, device=unseen)
    nll = prediction.exact_nll(h, weight, torch.tensor([1, value, 2], device=unseen), bias, class_weight=cost)
    assert nll.isnan().tolist() == [False, True, False]
    ids = torch.tensor([[3, 1, -1], [3, value, 2], [-1, -1, -1]], device=unseen)
    logits, found = prediction.rerank(h, weight, ids, 3, bias, normalize=True)
    known = value == -1
    assert logits.isnan().sum() == (0 if known else 1)
    if not known:
        assert logits[1, 0].isnan()  # as in torch.topk nan is the largest
        assert found[1, 0] == value
    assert sorted(found[0].tolist()) == [-1, 1, 3]
    assert found[2].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("wrong", [[20, -1], [1 << 40, 3]])
def test_numbers_of_examples_of_a_dynamic_sampler(wrong, unseen):
    """The rows of an index out of range are nan; the numbers of the others move as if these rows were not there."""
    import samplex_cuda as sx

    after = []
    for index in ([4, 0, 7, 7], [4, 0, *wrong]):
        torch.manual_seed(0)
        sampler = sx.samplers.Quadratic(torch.zeros(CLASSES, 8))
        loss = sx.losses.AugmentReduce(num_examples=20)
        head = sx.SampledClassifier(8, CLASSES, sampler, 5, loss=loss, reduction="none").to(unseen)
        h, y = torch.randn(4, 8).to(unseen), torch.tensor([1, 2, 3, 4], device=unseen)
        out = head(h, y, key=sx.Key(1), index=torch.tensor(index, device=unseen))
        after.append((out.detach(), head.log_eta.clone()))
    (good, all_four), (bad, two) = after
    assert torch.equal(bad[:2], good[:2])
    assert bad[2].isnan()
    assert torch.equal(two[[4, 0]], all_four[[4, 0]])
    moved = (two != two[1]).nonzero().flatten().tolist()
    assert set(moved) <= {0, 3, 4}


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("weighted", [False, True])
def test_midx(weighted, value, device):
    import test_midx_sample as midx

    made, _ = midx.tables(device, weighted=weighted, batch=3)
    inside = 0 <= value < midx.C
    ids = torch.tensor([[0, value], [1, 2], [3, 4]], device=device)
    plain = ops.midx_log_prob(torch.tensor([[0, 5], [1, 2], [3, 4]], device=device), *made, 0.1)
    log_q = ops.midx_log_prob(ids, *made, 0.1)
    keep = torch.tensor([[True, False], [True, True], [True, True]])
    assert torch.equal(log_q[keep], plain[keep])
    assert inside or bool(log_q[0, 1].isnan())
    # Excluded classes that do not ascend: whatever the draws are, they are classes.
    exclude = torch.tensor([[3, value, 2, 2]] * 3, device=device)
    for seed in range(3):
        drawn, _ = ops.midx_sample(torch.tensor([seed, 0], device=device), 9, *made, 0.1, False, exclude)
        assert ((drawn >= 0) & (drawn < midx.C)).all()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("field", ["target", "ids"])
@pytest.mark.parametrize("value", BAD)
def test_unit_rows(shared, field, value, device):
    """Cosine logits with a margin: the length of a row that is not there is not asked for either."""
    g = torch.Generator().manual_seed(3)
    h, weight = torch.randn(4, 8, generator=g).to(device), torch.randn(CLASSES, 8, generator=g).to(device)
    shape = (6,) if shared else (4, 6)
    given = {"target": torch.tensor([1, 2, 3, 4]), "ids": torch.randint(CLASSES, shape, generator=g)}
    margin = losses.ArcFace(0.5)

    def loss(ids):
        placed = {name: t.to(device) for name, t in ids.items()}
        log_q = torch.full(shape, -2.0, device=device)
        return functional.sampled_softmax(
            h, weight, placed["target"], placed["ids"], log_q, reduction="none", normalize=True, margin=margin
        )

    good = loss(given)
    given[field][1 if shared or field == "target" else (1, 2)] = value
    bad = loss(given)
    assert good.isfinite().all()
    if shared and field == "ids":
        assert bad.isnan().all()
        return
    assert bad.isnan().tolist() == [False, True, False, False]
    others = torch.tensor([0, 2, 3])
    assert torch.equal(bad[others], good[others])
