"""What every fused loss promises, whatever its formula: single gradients, sparse rows, bits, torch's own checks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import entry_cases
import pytest
import softmax_cases
import torch
from loss_cases import check_against, dense, leaf, magnitude, run_ours, upstream

from samplex_cuda import _native, functional
from samplex_cuda.testing import assert_close

NAN, INF = float("nan"), float("inf")


@dataclasses.dataclass(frozen=True, eq=False)  # by identity: a key of tables
class Loss:
    """A fused loss, and the options of a case that make its whole formula count."""

    name: str
    make_case: Callable[..., Any]
    op_args: Callable[..., tuple[Any, ...]]
    usual: dict[str, Any]

    @property
    def op(self) -> Any:
        ops = torch.ops.samplex
        return (ops.sampled_softmax if self.name == "sampled_softmax" else ops.entry_loss).default


SOFTMAX = Loss("sampled_softmax", softmax_cases.make_case, softmax_cases.op_args, {"smoothing": 0.1})
ENTRY = [
    Loss(name, entry_cases.maker(name), entry_cases.op_args, {"reg": 0.1} if name == "negative_sampling" else {})
    for name in entry_cases.LOSSES
]
NOISE, NCE, ONE_VS_EACH, AUGMENT_REDUCE = ENTRY


@pytest.fixture(params=[SOFTMAX, *ENTRY], ids=lambda loss: loss.name)
def loss(request) -> Loss:
    return request.param


def each(table: dict[Loss, dict[str, Any]]) -> Any:
    """Parameters (loss, entry) for every entry of each loss's own table."""
    return [pytest.param(loss, entry, id=f"{loss.name}-{key}") for loss in table for key, entry in table[loss].items()]


# ------------------------------------------------------------------------------------------------ gradients
@pytest.mark.parametrize("needs", ["h", "weight", "bias", "h weight", "weight bias"])
@pytest.mark.parametrize("shared", [False, True])
def test_each_gradient_is_the_same_when_asked_for_alone(backend, loss, needs, shared):
    case = loss.make_case(shared=shared, bias="weight", **loss.usual)
    every = run_ours(case, backend.device)
    c = case.to(backend.device)
    tensors = {"h": c.h.clone(), "weight": c.weight.clone(), "bias": c.bias.clone()}
    for name in needs.split():
        tensors[name].requires_grad_()
    outputs = list(c.outputs(**tensors).values())
    torch.autograd.backward(outputs, [g.to(backend.device) for g in upstream(case, len(outputs))])
    for name, t in tensors.items():
        assert (t.grad is not None) == (name in needs.split())
        if t.grad is not None:
            assert torch.equal(dense(t.grad), every[f"d_{name}"])


def test_no_grad_gives_the_same_loss(backend, loss):
    case = loss.make_case(**loss.usual).to(backend.device)
    with torch.no_grad():
        value = case.call(weight=leaf(case.weight))
    assert not value.requires_grad
    assert torch.equal(value, case.call(weight=leaf(case.weight)).detach())


@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(backend, loss, weighted):
    more = {"targets": 2} if loss is not NOISE else {}
    case = loss.make_case(6, ignore="padding", class_weight=weighted, seed=3, **more)
    c = case.to(backend.device)
    rows = c.call(reduction="none")
    torch.testing.assert_close(c.call(reduction="sum"), rows.sum())
    torch.testing.assert_close(c.call(reduction="mean").cpu(), rows.sum().cpu() / case.denominators().sum())


def test_strided_tensors_are_as_good_as_packed_ones(backend, loss):
    more = {"targets": 2, "positives": True} if loss is not NOISE else loss.usual
    case = loss.make_case(6, 8, 16, bias="weight", class_weight=True, **more)
    plain = run_ours(case, backend.device)

    def strided(t):
        wide = torch.stack([t, torch.zeros_like(t)], -1)[..., 0]
        return wide.transpose(0, 1).contiguous().transpose(0, 1) if wide.dim() > 1 else wide

    other = case.map(strided)
    assert not other.weight.is_contiguous()
    assert not other.bias.is_contiguous()
    assert not other.options["class_weight"].is_contiguous()
    for name, value in run_ours(other, backend.device).items():
        assert torch.equal(value, plain[name]), name


# ------------------------------------------------------------------------------------------------ corners
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty_batch(backend, loss, shared, reduction):
    case = loss.make_case(0, 8, 16, shared=shared, bias="weight", **loss.usual).to(backend.device)
    h, weight, bias = leaf(case.h), leaf(case.weight), leaf(case.bias)
    value = case.call(reduction=reduction, h=h, weight=weight, bias=bias)
    value.sum().backward()
    assert value.shape == (() if reduction != "none" else (0,))
    assert value.sum() == 0
    assert h.grad.shape == (0, 16)
    assert weight.grad._nnz() == bias.grad._nnz() == 0


@pytest.mark.parametrize("shared", [False, True])
def test_all_rows_ignored_is_zero(backend, loss, shared):
    case = loss.make_case(4, shared=shared, **loss.usual).to(backend.device)
    case.target.fill_(-100)
    h, weight = leaf(case.h), leaf(case.weight)
    value = case.call(reduction="mean", h=h, weight=weight)
    value.backward()
    assert value == 0
    assert not h.grad.any()
    assert not dense(weight.grad).any()
    if not shared:  # shared draws are rows of a GEMM: listed, though zero
        assert weight.grad._nnz() == 0


@pytest.mark.parametrize("shared", [False, True])
def test_a_bad_number_in_an_ignored_row_is_not_read(backend, loss, shared):
    case = loss.make_case(4, 8, 16, shared=shared)
    case.target[2] = -100
    clean = run_ours(case, backend.device)
    case.h[2] = NAN
    found = run_ours(case, backend.device)
    for name in found.keys() - {"d_weight"}:
        torch.testing.assert_close(found[name], clean[name])
    assert found["loss"][2] == 0
    if not shared:  # shared draws reduce over the batch by a GEMM, where 0 * nan is nan, as in F.linear's backward
        assert torch.equal(found["d_weight"], clean["d_weight"])


def test_an_infinite_upstream_gradient_touches_no_row_outside(backend, loss):
    # Coefficients of an ignored row become inf * 0 = nan; its target is not a class, and must not become a row.
    case = loss.make_case(3, 4, 8).to(backend.device)
    case.target[1], case.options["ignore_index"] = 1000, 1000
    weight = leaf(case.weight)
    case.call(reduction="none", weight=weight).backward(torch.tensor([1.0, INF, 1.0], device=backend.device))
    assert int(weight.grad._indices().max()) < 40


# ------------------------------------------------------------------------------------------------ sparse gradients
@pytest.mark.parametrize("shared", [False, True])
def test_sparse_gradients_are_coalesced_and_equal_the_dense_ones(backend, loss, shared):
    case = loss.make_case(5, 12, 16, shared=shared, bias="weight", ignore="padding", **loss.usual).to(backend.device)
    grads = {}
    for sparse in (True, False):
        weight, bias = leaf(case.weight), leaf(case.bias)
        value = case.call(reduction="mean", sparse=sparse, weight=weight, bias=bias)
        grads[sparse] = torch.autograd.grad(value, (weight, bias))
    for ours, full in zip(grads[True], grads[False], strict=True):
        assert ours.is_sparse
        assert ours.is_coalesced()
        assert not full.is_sparse
        ids = ours._indices()[0]
        assert ids.dtype == torch.int64
        assert (ids.diff() > 0).all()
        assert torch.equal(ours.to_dense(), full)
    used, drawn = case.target[case.target >= 0], case.ids.expand(5, -1)[case.target >= 0]
    assert torch.equal(grads[True][0]._indices()[0], torch.cat([used, drawn.reshape(-1)]).unique())


def test_a_graph_can_be_walked_twice(backend, loss):
    case = loss.make_case().to(backend.device)
    weight = leaf(case.weight)
    value = case.call(reduction="mean", weight=weight)
    value.backward(retain_graph=True)
    first = weight.grad.to_dense()
    weight.grad = None
    value.backward()
    assert torch.equal(weight.grad.to_dense(), first)


# ------------------------------------------------------------------------------------------------ determinism
@pytest.mark.parametrize("shared", [False, True])
def test_same_bits_twice(backend, loss, shared):
    more = {"targets": 2} if loss is not NOISE else {}
    case = loss.make_case(8, 33, 20, shared=shared, bias="weight", **loss.usual, **more)
    one, two = run_ours(case, backend.device), run_ours(case, backend.device)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_same_bits_for_any_number_of_threads(simd_level, loss, dtype):
    # Enough rows for two shares of the forward and enough entries for two chunks of the row reduction.
    case = loss.make_case(260, 33, 40, classes=500, bias="weight", dtype=dtype, **loss.usual)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run_ours(case))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in other)


# The other entry losses share row loads and products with negative sampling: fewer shapes.
SIMD = [(loss, dtype, dim) for loss in (SOFTMAX, NOISE) for dtype in ("float32", "bfloat16", "float16")
        for dim in (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 130)]  # fmt: skip
SIMD += [(loss, dtype, dim) for loss in ENTRY[1:] for dtype in ("float32", "bfloat16") for dim in (1, 9, 33)]
TILES = [(loss, samples) for loss in (SOFTMAX, NOISE) for samples in range(20)]
TILES += [(loss, samples) for loss in ENTRY[1:] for samples in (1, 3, 8, 17)]


def label(value: Any) -> str:
    return value.name if isinstance(value, Loss) else str(value)


@pytest.mark.parametrize(("loss", "dtype", "dim"), SIMD, ids=label)
@pytest.mark.parametrize("shared", [False, True])
def test_every_simd_level_meets_the_reference_and_scalar(simd_level, loss, dtype, dim, shared):
    case = loss.make_case(3, dim % 19, dim, dtype=getattr(torch, dtype), bias="weight", shared=shared, **loss.usual)
    ours = run_ours(case)
    check_against(case, ours)
    _native.set_simd_level("scalar")
    scalar = run_ours(case)
    _native.set_simd_level(simd_level)
    for name, value in ours.items():
        wanted = scalar[name]
        assert_close(name, value, wanted.double(), wanted, magnitude=magnitude(case, name, wanted))


@pytest.mark.parametrize(("loss", "samples"), TILES, ids=label)
def test_simd_levels_around_the_tile(simd_level, loss, samples):
    more = {"targets": 2} if loss is not NOISE else loss.usual
    case = loss.make_case(2, samples, 24, bias="weight", **more)
    check_against(case, run_ours(case))


# ------------------------------------------------------------------------------------------------ torch's own checks
GRADCHECK = {
    SOFTMAX: {
        "per row": {},
        "shared": {"shared": True},
        "targets": {"targets": 3, "smoothing": 0.2, "class_weight": True},
        "absolute": {"absolute": True, "scale": 0.8},
        "ignored": {"ignore": "padding", "positives": True, "shared": True, "smoothing": 0.1},
    },
    NOISE: {
        "per row": {},
        "shared": {"shared": True, "reg": 0.2},
        "regularised": {"reg": 0.3, "scale": 0.8, "class_weight": True},
        "ignored": {"ignore": "padding", "shared": True},
        "targets": {"targets": 3, "reg": 0.2, "class_weight": True, "positives": True},
    },
} | {
    loss: {
        "per row": {"scale": 0.8},
        "targets": {"targets": 3, "class_weight": True},
        "ignored": {"ignore": "padding", "positives": True, "shared": True, "targets": 2},
    }
    for loss in ENTRY[1:]
}


@pytest.mark.parametrize(("loss", "options"), each(GRADCHECK))
def test_gradcheck(backend, loss, options):
    case = loss.make_case(3, 5, 4, classes=9, dtype=torch.float64, bias="weight", **options).to(backend.device)

    def call(h, weight, bias):
        return tuple(case.outputs(h, weight, bias, sparse=False).values())

    assert torch.autograd.gradcheck(call, (leaf(case.h), leaf(case.weight), leaf(case.bias)))


OPCHECK = {
    SOFTMAX: {
        "plain": ({}, {}),
        "no grad": ({"bias": "weight"}, {"need_grad": False, "requires_grad": False}),
        "shared": ({"shared": True, "bias": "weight", "smoothing": 0.1, "class_weight": True}, {}),
        "targets": ({"targets": 3, "positives": True, "absolute": True, "scale": 2.0}, {}),
        "bfloat16": ({"dtype": torch.bfloat16, "bias": "float32"}, {}),
        "empty": ({"rows": 0}, {}),
        "no samples": ({"samples": 0, "bias": "weight"}, {}),
    },
    NOISE: {
        "plain": ({}, {}),
        "no grad": ({"bias": "weight"}, {"need_grad": False, "requires_grad": False}),
        "shared": ({"shared": True, "bias": "weight", "reg": 0.1, "class_weight": True}, {}),
        "bfloat16": ({"dtype": torch.bfloat16, "bias": "float32"}, {"reduction": 1}),
        "empty": ({"rows": 0, "reg": 0.1}, {"reduction": 2}),
        "no samples": ({"samples": 0, "bias": "weight"}, {}),
    },
} | {
    loss: {
        "plain": ({}, {}),
        "targets": ({"targets": 3, "positives": True, "shared": True, "bias": "weight"}, {"reduction": 1}),
        "empty": ({"rows": 0}, {"need_grad": False, "requires_grad": False}),
    }
    for loss in ENTRY[1:]
}


@pytest.mark.parametrize(("loss", "given"), each(OPCHECK))
def test_opcheck_forward(backend, loss, given):
    options, flags = given
    case = loss.make_case(**({"rows": 3, "samples": 4, "dim": 5, "classes": 12} | options)).to(backend.device)
    torch.library.opcheck(loss.op, loss.op_args(case, **flags))


COMPILE = [(loss, compiler, sparse) for loss in (SOFTMAX, NOISE) for compiler in ("aot_eager", "inductor")
           for sparse in (True, False)]  # fmt: skip
COMPILE += [(loss, "aot_eager", True) for loss in ENTRY[1:]]


@pytest.mark.parametrize(("loss", "compiler", "sparse"), COMPILE, ids=label)
def test_compile_with_a_dynamic_batch(backend, loss, compiler, sparse):
    if compiler == "inductor" and backend.emulated:
        pytest.skip("what inductor makes of the graph does not depend on who serves the op")
    torch._dynamo.reset()
    graphs: list[Any] = []
    compiles: list[int] = []

    options = {"reg": 0.1} if loss is NOISE else {}

    def step(h, weight, bias, target, ids, log_q, *more):
        return getattr(functional, loss.name)(
            2 * h, weight, target, ids, log_q, *more, bias=bias, sparse=sparse, **options
        ).square()

    def count(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, example_inputs)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=count)
    for rows in (3, 5, 8):
        case = loss.make_case(rows, 6, 8, bias="weight", seed=rows, **loss.usual).to(backend.device)
        more = () if loss is SOFTMAX else case.between()
        results = []
        for function in (step, compiled):
            h, weight, bias = leaf(case.h), leaf(case.weight), leaf(case.bias)
            value = function(h, weight, bias, case.target, case.ids, case.log_q, *more)
            value.backward()
            assert weight.grad.is_sparse == sparse
            results.append([value.detach(), h.grad, weight.grad.to_dense(), bias.grad.to_dense()])
        compiles.append(len(graphs))
        for eager, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)  # inductor fuses the products
    assert compiles[0] == compiles[-1] > 0, "a new batch size must not compile again"


def test_double_backward_is_a_clear_error(backend, loss):
    case = loss.make_case().to(backend.device)
    h = leaf(case.h)
    with pytest.raises(RuntimeError, match=rf"{loss.name}: double backward .* is not supported"):
        torch.autograd.grad(case.call(reduction="mean", h=h), h, create_graph=True)


# ------------------------------------------------------------------------------------------------ autocast, memory
@pytest.mark.parametrize("shared", [False, True])
def test_autocast_casts_the_hidden_vectors_only(backend, loss, shared):
    case = loss.make_case(5, 8, 16, shared=shared, bias="weight", **loss.usual).to(backend.device)
    small = case.h.bfloat16()
    weight, bias, h = leaf(case.weight), leaf(case.bias), leaf(small)
    with torch.autocast(backend.device.type, torch.bfloat16):
        value = case.call(reduction="mean", h=h, weight=weight, bias=bias)
        value.backward()  # inside: the backward of an autocast region may run under it
    assert value.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32
    assert h.grad.dtype == torch.bfloat16
    plain_w, plain_b = leaf(case.weight), leaf(case.bias)
    plain = case.call(reduction="mean", h=small.float(), weight=plain_w, bias=plain_b)
    plain.backward()
    assert torch.equal(value, plain)
    assert torch.equal(weight.grad.to_dense(), plain_w.grad.to_dense())
    assert torch.equal(bias.grad.to_dense(), plain_b.grad.to_dense())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_step_allocates_the_size_of_the_table(loss, shared, autocast):
    classes, dim, rows, samples = 100_000, 64, 32, 16
    case = loss.make_case(rows, samples, dim, classes=classes, shared=shared, bias="weight", **loss.usual)
    h = leaf(case.h, torch.bfloat16 if autocast else torch.float32)
    weight, bias = leaf(case.weight), leaf(case.bias)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            case.call(reduction="mean", h=h, weight=weight, bias=bias).backward()

    step()
    weight.grad = bias.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    allocated = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    assert len(allocated) > 8, "the profiler saw nothing"
    # A handful of [B, d], [B, m] and [rows, d] tensors; the smallest table, one byte a class, would be 100 kB.
    entries = rows * (samples + 1)
    assert max(allocated) <= 4 * entries * dim + 4096
    assert max(allocated) < classes * dim / 8


# ------------------------------------------------------------------------------------------------ on a device
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: host ids are checked before a kernel")
def test_debug_flag_traps_inside_the_kernel(loss):
    """A trap ends the CUDA context, so a separate process."""
    code = f"""
import torch
from samplex_cuda import functional
d = "cuda"
ids = torch.tensor([[1, 99]], device=d)
more = () if "{loss.name}" in ("sampled_softmax", "one_vs_each") else (torch.zeros(1, device=d),)
functional.{loss.name}(torch.ones(1, 4, device=d), torch.ones(5, 4, device=d), torch.tensor([0], device=d), ids,
                       torch.zeros(1, 2, device=d), *more)
torch.cuda.synchronize()
"""
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"SAMPLEX_DEBUG": "1"}, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert f"{loss.name}: ids must be in [0, 5), got 99 at flat position 1" in run.stdout + run.stderr
