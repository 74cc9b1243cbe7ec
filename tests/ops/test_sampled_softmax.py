"""Fused sampled softmax against its specification, on every backend: values, gradients, sparse rows.

What it shares with the other fused loss is in test_fused_losses.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from loss_cases import check_case, dense, leaf, name_of, pairwise
from softmax_cases import LossAlone, make_case, op_args

from samplex_cuda import functional
from samplex_cuda.reference.sampled_softmax import sampled_softmax as reference

OP = torch.ops.samplex.sampled_softmax.default
OP_BWD = torch.ops.samplex.sampled_softmax_bwd.default


GRID = pairwise({
    "dim": [1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 128, 130, 256, 512, 1024, 1025, 1100],
    "samples": [0, 1, 2, 31, 33, 64, 65],
    "dtype": [torch.float32, torch.bfloat16, torch.float16, torch.float64],
    "ignore": ["none", "padding", "class", "beyond"],
    "rows": [0, 1, 5],
    "bias": ["none", "weight", "float32"],
    "targets": [1, 3],
    "shared": [False, True],
    "scale": [1.0, 2.5],
    "absolute": [False, True],
    "smoothing": [0.0, 0.1],
    "class_weight": [False, True],
    "positives": [False, True],
})  # fmt: skip


# ------------------------------------------------------------------------------------------------ values, gradients
@pytest.mark.parametrize("row", GRID, ids=name_of)
def test_values_and_gradients_match_the_reference(backend, row):
    check_case(make_case(**row), backend)


USUAL = pairwise({
    "dim": [8, 16, 24, 32, 48, 64, 128, 256, 512, 528],
    "samples": [1, 7, 8, 9, 16, 17, 61, 64, 65],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "ignore": ["none", "padding", "class", "beyond"],
    "rows": [1, 5, 40],
    "bias": ["none", "weight", "float32"],
    "scale": [1.0, 2.5],
    "class_weight": [False, True],
    "classes": [3, 40],  # with 3, rows without a draw of their own come up
})  # fmt: skip


@pytest.mark.parametrize("row", USUAL, ids=name_of)
def test_the_usual_form_without_its_second_output(simd_level, row):
    class Cpu:
        device = torch.device("cpu")

    check_case(
        make_case(form=LossAlone, **(row | {"classes": max(row["classes"], 8 * (row["ignore"] == "class"))})), Cpu
    )


def check_bad_number(where, bad, dtype, dim, device="cpu"):
    case = make_case(6, 20, dim, classes=4000, form=LossAlone, dtype=dtype).to(device)
    if where == "h":
        case.h[2, 5] = bad
    elif where == "log_q":
        case.log_q[2, 11] = bad
    else:
        case.weight[case.ids[2, 11] if where == "weight of a draw" else case.target[2], 5] = bad
    h, weight = leaf(case.h), leaf(case.weight)
    loss = case.call(reduction="none", sparse=False, h=h, weight=weight)
    c = case.to(torch.device("cpu"))
    want = reference(c.h.double(), c.weight.double(), c.target, c.ids, c.log_q, **c.options)[0].to(device)
    others = torch.arange(6, device=device) != 2
    torch.testing.assert_close(loss[others], want[others].float())
    assert loss[2].isfinite() == want[2].isfinite()
    d_h, _ = torch.autograd.grad(loss[others].sum(), [h, weight])
    assert d_h[others].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["h", "weight of a draw", "weight of the target", "log_q"])
def test_a_bad_number_in_the_usual_form_spoils_its_own_row_only(simd_level, where, bad, dtype):
    check_bad_number(where, bad, dtype, 32)


@pytest.mark.parametrize("dim", [24, 32, 40, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["h", "weight of a draw", "weight of the target", "log_q"])
def test_an_infinite_number_in_the_usual_form_on_every_backend(backend, where, dtype, dim):
    """Lanes behind the last column must not multiply it by their zeros."""
    for bad in (float("inf"), -float("inf")):
        check_bad_number(where, bad, dtype, dim, backend.device)


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_everything_at_once(backend, shared, targets):
    case = make_case(7, 40, 24, targets=targets, shared=shared, bias="weight", scale=0.7, smoothing=0.2,
                     class_weight=True, ignore="padding", positives=True)  # fmt: skip
    check_case(case, backend)


@pytest.mark.parametrize("targets", [2, 17, 40])
def test_many_targets_span_several_tiles(backend, targets):
    check_case(make_case(3, 20, 9, targets=targets, classes=200, bias="weight"), backend)


def test_lse_alone_has_a_gradient(backend):
    case = make_case(bias="weight")
    c = case.to(backend.device)
    h, weight = leaf(c.h), leaf(c.weight)
    _, lse = functional.sampled_softmax(h, weight, c.target, c.ids, c.log_q, c.bias, return_lse=True)
    lse.sum().backward()
    h64, w64 = leaf(case.h, torch.float64), leaf(case.weight, torch.float64)
    reference(h64, w64, case.target, case.ids, case.log_q.double(), case.bias.double())[1].sum().backward()
    torch.testing.assert_close(h.grad.cpu().double(), h64.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dense(weight.grad).double(), w64.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_class_drawn_once_is_the_full_softmax(backend, reduction, weighted):
    # C - 1 other classes, each once: m = C draws, the one that hits is masked; log_q = -log m cancels the correction.
    classes, dim, rows = 30, 12, 6
    case = make_case(rows, 0, dim, classes=classes, bias="weight", class_weight=weighted, dtype=torch.float64)
    case.target[2] = -100
    case.ids = torch.arange(classes)
    case.log_q = torch.full((classes,), -float(torch.tensor(classes, dtype=torch.float64).log()), dtype=torch.float64)
    full_h, full_w, full_b = leaf(case.h), leaf(case.weight), leaf(case.bias)
    cw = case.options.get("class_weight")
    wanted = F.cross_entropy(1.5 * F.linear(full_h, full_w, full_b), case.target, cw, reduction=reduction)
    wanted.sum().backward()
    c = case.to(backend.device)
    h, weight, bias = leaf(c.h), leaf(c.weight), leaf(c.bias)
    c.options["scale"] = 1.5
    for ids, log_q in ((c.ids, c.log_q), (c.ids.expand(rows, -1), c.log_q.expand(rows, -1))):
        h.grad = weight.grad = bias.grad = None
        loss = functional.sampled_softmax(h, weight, c.target, ids, log_q, bias, reduction=reduction, **c.options)
        loss.sum().backward()
        torch.testing.assert_close(loss.cpu(), wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(h.grad.cpu(), full_h.grad, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(dense(weight.grad), full_w.grad, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(dense(bias.grad), full_b.grad, rtol=1e-11, atol=1e-12)


def test_label_smoothing_over_all_classes_is_that_of_cross_entropy(backend):
    classes, rows = 20, 4
    case = make_case(rows, 0, 8, classes=classes, dtype=torch.float64, smoothing=0.3).to(backend.device)
    ids = torch.arange(classes, device=backend.device)
    log_q = torch.full((classes,), 1.0 / classes, dtype=torch.float64, device=backend.device).log()
    ours = functional.sampled_softmax(case.h, case.weight, case.target, ids, log_q, **case.options)
    wanted = F.cross_entropy(F.linear(case.h, case.weight), case.target, label_smoothing=0.3)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", [False, True])
def test_leading_dimensions_are_flattened(backend, shared):
    case = make_case(6, 5, 8, shared=shared, targets=2).to(backend.device)
    flat, flat_lse = functional.sampled_softmax(
        case.h, case.weight, case.target, case.ids, case.log_q, reduction="none", return_lse=True
    )
    shape = lambda t: t.reshape(2, 3, *t.shape[1:])  # noqa: E731
    ids, log_q = (case.ids, case.log_q) if shared else (shape(case.ids), shape(case.log_q))
    nested, lse = functional.sampled_softmax(
        shape(case.h), case.weight, shape(case.target), ids, log_q, reduction="none", return_lse=True
    )
    assert nested.shape == lse.shape == (2, 3)
    assert torch.equal(nested.reshape(-1), flat)
    assert torch.equal(lse.reshape(-1), flat_lse)


def test_one_vector_without_a_batch(backend):
    case = make_case(1).to(backend.device)
    loss = functional.sampled_softmax(case.h, case.weight, case.target, case.ids, case.log_q, reduction="none")
    one = functional.sampled_softmax(
        case.h[0], case.weight, case.target[0], case.ids[0], case.log_q[0], reduction="none"
    )
    assert one.shape == ()
    assert torch.equal(one, loss[0])


# ------------------------------------------------------------------------------------------------ sparse gradients
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch.optim itself
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "SparseAdam"])
def test_torchs_optimizers_take_the_sparse_gradient(backend, optimizer):
    make = getattr(torch.optim, optimizer)
    steps, tables = 5, {}
    cases = [make_case(5, 12, 16, bias="weight", seed=s).to(backend.device) for s in range(steps)]
    for sparse in (True, False):
        weight, bias = leaf(cases[0].weight), leaf(cases[0].bias)
        opt = make([weight, bias], lr=0.05)
        for case in cases:
            opt.zero_grad()
            loss = functional.sampled_softmax(case.h, weight, case.target, case.ids, case.log_q, bias, sparse=sparse)
            loss.backward()
            if optimizer == "SparseAdam" and not sparse:
                weight.grad, bias.grad = weight.grad.to_sparse(1), bias.grad.to_sparse(1)
            opt.step()
        tables[sparse] = weight.detach(), bias.detach()
    assert not torch.equal(tables[True][0], cases[0].weight)
    for ours, full in zip(tables[True], tables[False], strict=True):
        torch.testing.assert_close(ours, full, rtol=1e-6, atol=1e-6)


def test_gradients_accumulate_over_two_backwards(backend):
    a, b = (make_case(4, 6, 8, seed=s).to(backend.device) for s in (0, 1))
    weight = leaf(a.weight)
    separate = []
    for case in (a, b):
        weight.grad = None
        functional.sampled_softmax(case.h, weight, case.target, case.ids, case.log_q).backward()
        separate.append(weight.grad.to_dense())
    weight.grad = None
    for case in (a, b):
        functional.sampled_softmax(case.h, weight, case.target, case.ids, case.log_q).backward()
    torch.testing.assert_close(weight.grad.to_dense(), separate[0] + separate[1])


def test_grad_knows_that_it_is_coalesced_and_a_sum_of_two_is_right(backend):
    # Autograd's accumulation forgets the flag; an optimizer would sort again. It must not be set on a sum that is not.
    a, b = (make_case(4, 6, 8, seed=s).to(backend.device) for s in (0, 1))
    weight = leaf(a.weight)
    losses = [functional.sampled_softmax(c.h, weight, c.target, c.ids, c.log_q) for c in (a, b)]
    losses[0].backward(retain_graph=True)
    assert weight.grad.is_coalesced()
    first = dense(weight.grad)
    weight.grad = None
    losses[1].backward(retain_graph=True)
    second = dense(weight.grad)
    weight.grad = None
    sum(losses).backward()  # one graph that uses the table twice
    if weight.grad.is_coalesced():
        ids = weight.grad._indices()[0]
        assert (ids.diff() > 0).all()
    torch.testing.assert_close(dense(weight.grad), first + second)


# ------------------------------------------------------------------------------------------------ torch's own checks
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("need_rows", "with_bias", "with_lse"), [(True, True, True), (True, False, False), (False, False, True)]
)
def test_opcheck_backward(backend, shared, need_rows, with_bias, with_lse, reduction):
    # Every id once: rows behind `count` are unspecified, and opcheck would compare them.
    case = make_case(3, 4, 5, classes=100, shared=shared, smoothing=0.1)
    case.ids, case.target = torch.arange(case.ids.numel()).reshape(case.ids.shape), torch.tensor([50, 60, 70])
    case = case.to(backend.device)
    args = op_args(case, reduction=reduction, with_lse=with_lse, requires_grad=False)
    loss, lse, saved = OP(*args)
    grads = torch.randn_like(loss), torch.randn_like(lse) if with_lse else None
    torch.library.opcheck(
        OP_BWD, (*grads, args[0], args[2], args[3], saved, 100, reduction, with_lse, need_rows, with_bias)
    )


# ------------------------------------------------------------------------------------------------ autocast, memory
def test_autocast_with_a_half_table(backend):
    case = make_case(5, 8, 16, dtype=torch.bfloat16).to(backend.device)
    h = leaf(case.h.float())
    with torch.autocast(backend.device.type, torch.bfloat16):
        loss = functional.sampled_softmax(h, leaf(case.weight), case.target, case.ids, case.log_q)
    loss.backward()
    assert loss.dtype == h.grad.dtype == torch.float32


# ------------------------------------------------------------------------------------------------ labels of draws
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("absolute", "smoothing"), [(False, 0.0), (True, 0.1)])
def test_draws_of_the_rows_label_are_masked_like_known_positives(backend, dtype, absolute, smoothing):
    g = torch.Generator().manual_seed(0)
    b, m, d, c = 9, 37, 24, 50
    hidden, weight = (torch.randn(n, d, generator=g).to(dtype).to(backend.device) for n in (b, c))
    target, ids = (torch.randint(c, (n,), generator=g).to(backend.device) for n in (b, m))
    draw_labels, row_labels = (torch.randint(5, (n,), generator=g).to(backend.device) for n in (m, b))
    draw_labels[draw_labels == 4] = 3  # rows of label 4 mask nothing, not even the target
    row_labels[0], target[1] = 4, -100
    ids[:b] = target.clamp(min=0)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    log_q = torch.randn(m, generator=g).to(acc).to(backend.device)
    hidden[2] = torch.nan
    rest = (1.7, smoothing, -100, 0, absolute, True, True, True, True)
    got = OP(hidden, weight, target, ids, log_q, None, None, None, None, *rest, draw_labels, row_labels)
    hit = draw_labels == row_labels[:, None]
    # The same with ids of their own for all draws, of which a row knows those of its label.
    apart = torch.cat([weight, weight[ids]])
    own = torch.arange(c, c + m, device=backend.device)
    offsets = torch.cat([hit.new_zeros(1, dtype=torch.int64), hit.sum(1).cumsum(0)])
    want = OP(hidden, apart, target, own, log_q, None, None, offsets, own.expand(b, m)[hit].contiguous(), *rest)
    for a, e in zip(got, want, strict=True):
        assert torch.allclose(a, e, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert got[0][2].isnan()
    assert not got[0][3:].isnan().any()


def test_labels_are_for_shared_draws_of_rows_with_one_target():
    h, w, ids = torch.randn(2, 4), torch.randn(5, 4), torch.arange(2)
    rest = (1.0, 0.0, -100, 1, False, False, False, True, True)
    for target, draws, known, labels in (
        (ids, ids.expand(2, 2).contiguous(), (None, None), (ids, ids)),
        (ids.expand(2, 2).contiguous(), ids, (None, None), (ids, ids)),
        (ids, ids, (None, None), (ids, None)),
        (ids, ids, (None, None), (torch.arange(3), ids)),
        (ids, ids, (None, None), (ids, ids.float())),
    ):
        with pytest.raises(RuntimeError, match=r"draw_labels|row_labels"):
            OP(h, w, target, draws, torch.zeros(draws.shape), None, None, *known, *rest, *labels)
