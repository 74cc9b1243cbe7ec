"""`functional.full_softmax` against `F.cross_entropy` on all classes, forward and backward."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import samplex_cuda as sx
from samplex_cuda import chunking, prediction
from samplex_cuda.functional import full_softmax
from samplex_cuda.testing import assert_close

C, D, B = 53, 9, 6


def make(batch=B, classes=C, dim=D, dtype=torch.float64, bias=True):
    h = torch.randn(batch, dim).to(dtype).requires_grad_()
    weight = torch.randn(classes, dim).to(dtype).requires_grad_()
    b = torch.randn(classes).to(dtype).requires_grad_() if bias else None
    return h, weight, torch.randint(classes, (batch,)), b


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])


def compare(mine, theirs, *leaves, **tolerances):
    torch.testing.assert_close(mine, theirs, **tolerances)
    for got, wanted in zip(gradients(mine, *leaves), gradients(theirs, *leaves), strict=True):
        torch.testing.assert_close(got, wanted, **tolerances)


# ------------------------------------------------------------------------------------------------ F.cross_entropy
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_is_cross_entropy(backend, reduction, smoothing, weighted):
    h, weight, y, bias = (t.detach().to(backend.device) for t in make())
    h, weight, bias = (t.requires_grad_() for t in (h, weight, bias))
    y[2] = -100
    class_weight = torch.rand(C, dtype=torch.float64, device=backend.device) if weighted else None
    mine = full_softmax(
        h,
        weight,
        y,
        bias,
        scale=1.7,
        reduction=reduction,
        label_smoothing=smoothing,
        class_weight=class_weight,
        chunk_size=20,
    )
    logits = 1.7 * F.linear(h, weight, bias)
    theirs = F.cross_entropy(logits, y, weight=class_weight, reduction=reduction, label_smoothing=smoothing)
    compare(mine, theirs, h, weight, bias)


@pytest.mark.parametrize("chunk_size", [1, 52, 53, 54, None])
def test_every_chunk_size(chunk_size):
    h, weight, y, _ = make(bias=False)
    compare(full_softmax(h, weight, y, chunk_size=chunk_size), F.cross_entropy(h @ weight.t(), y), h, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_types_sum_in_float32(backend, dtype):
    h, weight, y, bias = make(dtype=dtype)
    leaves = [t.detach().to(backend.device).requires_grad_() for t in (h, weight, bias)]
    mine = full_softmax(leaves[0], leaves[1], y.to(backend.device), leaves[2], chunk_size=20)
    assert mine.dtype == torch.float32
    exact = [t.detach().double().requires_grad_() for t in (h, weight, bias)]
    theirs = F.cross_entropy(F.linear(*exact), y)
    single = [t.detach().float().requires_grad_() for t in (h, weight, bias)]
    torchs = F.cross_entropy(F.linear(*single), y)
    assert_close("loss", mine.detach().cpu(), theirs.detach(), torchs.detach(), magnitude=30.0)
    for name, got, wanted, by_torch in zip(
        ("h", "weight", "bias"),
        gradients(mine, *leaves),
        gradients(theirs, *exact),
        gradients(torchs, *single),
        strict=True,
    ):
        assert got.dtype == dtype
        assert_close(name, got.cpu(), wanted, by_torch.to(dtype), ulps=16)


def test_blocks_of_rows_join(monkeypatch):
    monkeypatch.setattr(chunking, "_BLOCK_ROWS", 4)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.bfloat16, 2e-2)):
        h, weight, y, bias = make(batch=11, dtype=dtype)
        mine = full_softmax(h, weight, y, bias)
        exact = [t.detach().double().requires_grad_() for t in (h, weight, bias)]
        wanted = gradients(F.cross_entropy(F.linear(*exact), y), *exact)
        for got, theirs in zip(gradients(mine, h, weight, bias), wanted, strict=True):
            torch.testing.assert_close(got.double(), theirs, rtol=tolerance, atol=tolerance)


def test_several_targets_absolute_and_class_weights():
    h, weight, _, bias = make(batch=4)
    y = torch.tensor([[3, 5, -100], [8, -100, -100], [-100, -100, -100], [7, 7, 1]])
    cw = torch.rand(C, dtype=torch.float64)
    mine = full_softmax(h, weight, y, bias, absolute=True, scale=-1.5, class_weight=cw, reduction="none", chunk_size=6)
    log_p = (-1.5 * F.linear(h, weight, bias)).abs().log_softmax(1)
    rows = [
        -(cw[3] * log_p[0, 3] + cw[5] * log_p[0, 5]) / 2,
        -cw[8] * log_p[1, 8],
        0.0 * log_p[2, 0],
        -(2 * cw[7] * log_p[3, 7] + cw[1] * log_p[3, 1]) / 3,
    ]
    theirs = torch.stack(rows)
    torch.testing.assert_close(mine, theirs)
    compare(mine.sum(), theirs.sum(), h, weight, bias)
    mean = full_softmax(h, weight, y, bias, absolute=True, scale=-1.5, class_weight=cw)
    total = (cw[3] + cw[5]) / 2 + cw[8] + (2 * cw[7] + cw[1]) / 3
    torch.testing.assert_close(mean, theirs.sum() / total)


def test_gradcheck():
    h, weight, y, bias = make(batch=3, classes=7, dim=2)
    y[1] = -100
    cw = torch.rand(7, dtype=torch.float64)

    def loss(h, weight, bias):
        return full_softmax(
            h, weight, y, bias, scale=0.7, label_smoothing=0.1, class_weight=cw, reduction="none", chunk_size=3
        )

    assert torch.autograd.gradcheck(loss, (h, weight, bias))


def test_only_what_is_asked_for():
    h, weight, y, bias = make()
    whole = gradients(full_softmax(h, weight, y, bias), h, weight, bias)
    for i in range(3):
        leaves = [t.detach().requires_grad_(j == i) for j, t in enumerate((h, weight, bias))]
        (got,) = gradients(full_softmax(leaves[0], leaves[1], y, leaves[2]), leaves[i])
        assert torch.equal(got, whole[i])


# ------------------------------------------------------------------------------------------------ kept logits
class _Products(TorchDispatchMode):
    """Shapes of the products of rows with class rows; those of the gradients have the width of a row."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.out and out.shape[1] != D:
            self.made.append(tuple(out.shape))
        return out


OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1, "class_weight": torch.linspace(0.1, 2.0, C)},
    "absolute": {"absolute": True, "scale": -1.3},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=list(OPTIONS))
@pytest.mark.parametrize("rows", [1024, 4])
def test_kept_logits_change_nothing(monkeypatch, dtype, options, rows):
    """All kept, some kept and none: the same bits, and as many products as are left."""
    monkeypatch.setattr(chunking, "_BLOCK_ROWS", rows)
    arguments = OPTIONS[options]
    if arguments.get("class_weight") is not None:
        arguments = {
            **arguments,
            "class_weight": arguments["class_weight"].to(torch.promote_types(dtype, torch.float32)),
        }
    h, weight, y, bias = make(batch=11, dtype=dtype)
    if options != "plain":
        y[3] = -100
    blocks = -(-11 // rows)
    chunks = blocks * 3  # of 20, 20 and 13 classes
    item = torch.promote_types(dtype, torch.float32).itemsize
    results = {}
    for name, budget, again in (
        ("all", 1 << 20, 0),
        ("some", item * min(rows, 11) * 20, chunks - 1),
        ("none", 0, chunks),
    ):
        monkeypatch.setattr(chunking, "kept_bytes", lambda device, budget=budget: budget)
        with _Products() as forward:
            loss = full_softmax(h, weight, y, bias, chunk_size=20, **arguments)
        with _Products() as backward:
            results[name] = (loss, *gradients(loss.sum(), h, weight, bias))
        assert (len(forward.made), len(backward.made)) == (chunks, again)
    for name in ("some", "none"):
        for kept, computed in zip(results["all"], results[name], strict=True):
            assert torch.equal(kept, computed)


def test_second_backward_computes_what_the_first_overwrote():
    h, weight, y, bias = make()
    loss = full_softmax(h, weight, y, bias, chunk_size=20)
    first = torch.autograd.grad(loss, (h, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss, (h, weight, bias))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------ products by class
@pytest.fixture
def every_batch_by_class(monkeypatch):
    monkeypatch.setattr(chunking, "_LEAST_BY_CLASS", 1)


@pytest.mark.parametrize("classes", [53, 700])
@pytest.mark.parametrize("rows", [1, 6, 70])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"chunk_size": 20}, {"scale": 1.7}])
def test_products_by_class(simd_level, every_batch_by_class, rows, classes, options):
    """Products as [n, B], in one chunk and in several, with an ignored row, on every SIMD level."""
    h, weight, y, bias = make(rows, classes, 9, torch.float32)
    for ignored in (False, True):
        if ignored and rows > 1:
            y[rows // 2] = -100
        mine = full_softmax(h, weight, y, bias, **options)
        double = [t.detach().double().requires_grad_() for t in (h, weight, bias)]
        logits = options.get("scale", 1.0) * F.linear(*double)
        theirs = F.cross_entropy(logits, y, label_smoothing=options.get("label_smoothing", 0.0))
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)
        pairs = zip(gradients(mine, h, weight, bias), gradients(theirs, *double), strict=True)
        for got, wanted in pairs:
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-6)


def test_by_class_is_chosen_for_float32_batches_on_the_cpu(cpu, simd_level, monkeypatch):
    """Only where the passes are vectorised: the scalar kernels go by row."""
    seen = []
    monkeypatch.setattr(chunking, "product", lambda a, b, out: seen.append(tuple(out.shape)) or torch.mm(a, b, out=out))
    for rows, dtype in ((64, torch.float32), (63, torch.float32), (64, torch.float64)):
        h, weight, y, bias = make(rows, 100, 4, dtype)
        full_softmax(h, weight, y, bias, chunk_size=100)
    assert seen == [(64, 100) if simd_level == "scalar" else (100, 64), (63, 100), (64, 100)]


def test_one_chunk_has_the_same_gradients_the_second_time(every_batch_by_class):
    """The first backward overwrites the logits; the second makes them again, and takes the general path."""
    h, weight, y, bias = make(70, 90, 5, torch.float32)
    for reduction in ("mean", "sum"):
        loss = full_softmax(h, weight, y, bias, reduction=reduction)
        first, second = (torch.autograd.grad(3.0 * loss, (h, weight, bias), retain_graph=True) for _ in range(2))
        for one, two in zip(first, second, strict=True):
            torch.testing.assert_close(one, two)
        (alone,) = torch.autograd.grad(3.0 * full_softmax(h, weight, y, bias, reduction=reduction), weight)
        assert torch.equal(alone, first[1])


def test_a_changed_weight_is_found_before_backward():
    h, weight, y, _ = make(bias=False)
    loss = full_softmax(h, weight, y)
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class _Sizes(TorchDispatchMode):
    """The largest tensor that any operation answers with, in bytes, and the sum of the buffers of chunks."""

    def __init__(self):
        super().__init__()
        self.largest, self.buffers = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.nbytes)
        if func is torch.ops.samplex.predict_buffer.default:
            self.buffers += out.nbytes
        return out


def test_many_classes_have_no_table_of_logits():
    """At 100,000 classes the logits would take 102 MB; no tensor is larger than the weight, and few are kept."""
    batch, classes, dim = 256, 100_000, 8
    h, weight, y, bias = make(batch, classes, dim, torch.float32)
    cpu = torch.device("cpu")
    chunk = chunking.chunk_bytes(cpu, "logits by class")
    with _Sizes() as forward:
        loss = full_softmax(h, weight, y, bias)
    assert 0 < forward.buffers <= chunking.kept_bytes(cpu) + chunk
    with _Sizes() as backward:
        gradients(loss, h, weight, bias)
    # The gradient of weight, and one buffer for the chunks that were not kept.
    assert weight.nbytes < backward.buffers <= weight.nbytes + chunk
    assert max(forward.largest, backward.largest) <= max(weight.nbytes, chunk)


def test_chunk_sizes_come_from_one_place(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [chunking.chunk_bytes(device) for device in (cpu, cuda)] == [2 << 20, 256 << 20]
    cases = (
        # Three equal chunks of whole cache lines, of at most 300 classes.
        (4 * 6 * 300, 700, torch.float32, [(6, 240), (6, 240), (6, 220)]),
        (8 * 6 * 300, 700, torch.float64, [(6, 240), (6, 240), (6, 220)]),
        # Not two of 512, whose rows would lie 2,048 bytes apart; nor of 768.
        (4 * 6 * 520, 1024, torch.float32, [(6, 352), (6, 352), (6, 320)]),
        (4 * 6 * 800, 1536, torch.float32, [(6, 784), (6, 752)]),
        (4 * 6 * 700, 700, torch.float32, [(6, 700)]),
    )
    for nbytes, classes, dtype, shapes in cases:
        monkeypatch.setattr(chunking, "chunk_bytes", lambda device, of="logits", nbytes=nbytes: nbytes)
        h, weight, y, _ = make(classes=classes, dtype=dtype)
        with _Products() as products:
            full_softmax(h, weight, y)
        assert products.made == shapes


# ------------------------------------------------------------------------------------------------ corners
def test_corners():
    h, weight, y, bias = make()
    empty = full_softmax(h[:0], weight, y[:0], bias)
    ignored = full_softmax(h, weight, torch.full((B,), -100), bias)
    one = full_softmax(h, weight[:1], torch.zeros_like(y), bias[:1])
    for loss in (empty, ignored, one):
        assert loss.item() == 0.0
        for grad in gradients(loss, h, weight, bias):
            assert torch.equal(grad, torch.zeros_like(grad))
    assert full_softmax(h[:0], weight, y[:0], reduction="none").shape == (0,)


def test_nan_stays_in_its_row():
    h, weight, y, _ = make(bias=False)
    with torch.no_grad():
        h[2, 3] = torch.nan
    loss = full_softmax(h, weight, y, reduction="none")
    assert loss.isnan().nonzero().flatten().tolist() == [2]
    (grad,) = torch.autograd.grad(loss.sum(), h)
    assert grad.isnan().any(1).nonzero().flatten().tolist() == [2]
    # Of a row that does not count, not even that.
    y[2] = -100
    for grad in gradients(full_softmax(h, weight, y), h, weight):
        assert grad.isfinite().all()


def test_confident_rows_are_not_below_zero():
    h, weight = 40 * torch.randn(50, D), torch.randn(C, D)
    y = (h @ weight.t()).argmax(1)
    loss = full_softmax(h, weight, y, reduction="none", chunk_size=10)
    assert (loss >= 0).all()
    wanted = F.cross_entropy(h.double() @ weight.double().t(), y, reduction="none")
    torch.testing.assert_close(loss.double(), wanted, atol=1e-4, rtol=1e-4)


def test_leading_dimensions_and_autocast():
    weight = torch.randn(C, D, dtype=torch.bfloat16)
    h, y = torch.randn(2, 3, D), torch.randint(C, (2, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = full_softmax(h, weight, y, reduction="none")
    assert loss.shape == (2, 3)
    wanted = F.cross_entropy((h.bfloat16().double() @ weight.double().t()).flatten(0, 1), y.flatten(), reduction="none")
    torch.testing.assert_close(loss.double().flatten(), wanted, atol=1e-5, rtol=1e-5)


def test_is_the_evaluator():
    h, weight, y, bias = make(dtype=torch.float32)
    assert torch.equal(full_softmax(h, weight, y, bias, reduction="none"), prediction.exact_nll(h, weight, y, bias))


def test_opcheck_and_compile():
    h, weight, y, bias = make(dtype=torch.float32)
    rest = (y.unsqueeze(1), bias, None, 1.0, 0.1, -100, False, 20)
    torch.library.opcheck(torch.ops.samplex.full_softmax.default, (h, weight, *rest))
    compiled = torch.compile(lambda h, w: full_softmax(h * 2, w, y), backend="aot_eager", fullgraph=True)
    compare(compiled(h, weight), full_softmax(h * 2, weight, y), h, weight)


def test_double_backward_is_an_error():
    h, weight, y, _ = make()
    with pytest.raises(RuntimeError, match="full_softmax: double backward"):
        torch.autograd.grad(full_softmax(h, weight, y), h, create_graph=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": torch.full((B,), C)}, IndexError, f"full_softmax: target must be in [0, {C}) or -100, got {C}"),
        ({"target": torch.zeros(B)}, TypeError, "full_softmax: target must be int64"),
        ({"h": torch.zeros(B, D + 1)}, ValueError, f"full_softmax: h must be [*, {D}]"),
        ({"weight": torch.zeros(0, D)}, ValueError, "full_softmax: weight must have at least one class"),
        ({"bias": torch.zeros(C + 1)}, ValueError, f"full_softmax: bias must be [{C}]"),
        ({"reduction": "max"}, ValueError, "full_softmax: reduction must be one of none, mean, sum, got 'max'"),
        ({"label_smoothing": 1.5}, ValueError, "full_softmax: label_smoothing must be in [0, 1], got 1.5"),
        ({"chunk_size": 0}, ValueError, "full_softmax: chunk_size must be an int of at least 1, got 0"),
    ],
)
def test_errors(change, error, message):
    arguments = {"h": torch.zeros(B, D), "weight": torch.zeros(C, D), "target": torch.zeros(B, dtype=torch.int64)}
    with pytest.raises(error, match=re.escape(message)):
        full_softmax(**{**arguments, **change})


# ------------------------------------------------------------------------------------------------ the head
def test_head_trains_on_the_full_softmax():
    head = sx.SampledClassifier(D, C, loss=sx.losses.FullSoftmax(0.1), scale=1.3, class_weight=torch.rand(C))
    h, y = torch.randn(B, D), torch.randint(C, (B,))
    loss = head(h, y)
    wanted = F.cross_entropy(1.3 * head.linear()(h), y, weight=head.class_weight, label_smoothing=0.1)
    compare(loss, wanted, head.weight, head.bias)
    weights = torch.rand(B)
    rows = F.cross_entropy(1.3 * head.linear()(h), y, weight=head.class_weight, label_smoothing=0.1, reduction="none")
    total = (head.class_weight[y] * weights).sum()
    torch.testing.assert_close(head(h, y, sample_weight=weights), (rows * weights).sum() / total)
    linear = torch.nn.Linear(D, C)
    head.load_state_dict(linear.state_dict())
    assert sorted(head.state_dict()) == ["bias", "weight"]
    with pytest.raises(TypeError, match="sampler must be a sampler"):
        sx.SampledClassifier(D, C, num_samples=3)
