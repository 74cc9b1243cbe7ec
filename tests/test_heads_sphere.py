"""`SampledClassifier(normalize=True)`: rows on the sphere, margins, a learned scale, exact answers, what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import samplex_cuda as sx

CLASSES, DIM, BATCH, DRAWS = 60, 12, 7, 9
MARGINS = {
    "none": None,
    "arc": sx.losses.ArcFace(0.4),
    "cos": sx.losses.CosFace(0.3),
    "all": sx.losses.Margin(1.2, 0.2, 0.1),
}


def make_head(margin=None, *, dtype=torch.float64, scale=8.0, seed=0, loss=None, **options):
    torch.manual_seed(seed)
    loss = loss or sx.losses.SampledSoftmax(margin=margin)
    return sx.SampledClassifier(
        DIM, CLASSES, sx.samplers.LogUniform(CLASSES), DRAWS, loss, normalize=True, scale=scale, dtype=dtype,
        **options,
    )  # fmt: skip


def batch(step=0, dtype=torch.float64, targets=None):
    g = torch.Generator().manual_seed(100 + step)
    h = torch.randn(BATCH, DIM, generator=g).to(dtype).requires_grad_()
    y = torch.randint(CLASSES, (BATCH,) if targets is None else (BATCH, targets), generator=g)
    return h, y


def dense_loss(h, weight, y, draw, scale, margin=None):
    """The same in plain torch, over a dense table: what a person would write."""
    y = y.unsqueeze(1) if y.dim() == 1 else y
    cosine = F.normalize(h) @ F.normalize(weight).T
    ids = draw.ids.expand(h.shape[0], -1)
    own, drawn = cosine.gather(1, y), cosine.gather(1, ids)
    if margin is not None:
        own = torch.cos(margin.m1 * torch.acos(own) + margin.m2) - margin.m3
    drawn = scale * drawn - draw.log_q - math.log(ids.shape[1])
    drawn = drawn.masked_fill((ids.unsqueeze(2) == y.unsqueeze(1)).any(2), -math.inf)
    logits = torch.cat([scale * own, drawn], 1)
    return (logits.logsumexp(1) - scale * own.mean(1)).mean()


@pytest.mark.parametrize("targets", [None, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("margin", MARGINS)
def test_loss_and_gradients_are_those_of_a_dense_table(margin, shared, targets):
    head, key = make_head(MARGINS[margin], shared=shared), torch.tensor([3, 0])
    h, y = batch(targets=targets)
    loss = head(h, y, key=key)
    loss.backward()
    assert head.weight.grad.is_sparse
    draw = head.sampler.sample(h, DRAWS, shared=shared, key=key, exclude=None if shared else y)
    leaves = [t.detach().clone().requires_grad_() for t in (h, head.weight)]
    want = dense_loss(*leaves, y, draw, 8.0, MARGINS[margin])
    want.backward()
    torch.testing.assert_close(loss, want)
    for ours, theirs in zip((h, head.weight), leaves, strict=True):
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)


OPTIMIZERS = {
    "sgd": lambda p: sx.optim.RowSGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: sx.optim.RowSGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: sx.optim.RowAdagrad(p, lr=0.1),
    "rowwise": lambda p: sx.optim.RowAdagrad(p, lr=0.1, rowwise=True, weight_decay=0.01),
    "adam": lambda p: sx.optim.RowAdam(p, lr=0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fused_update_is_that_of_the_projected_gradient(name, shared, dtype):
    heads = [make_head(MARGINS["arc"], shared=shared, dtype=dtype) for _ in range(2)]
    optimizers = [OPTIMIZERS[name](head.parameters()) for head in heads]
    heads[0].fuse_optimizer(optimizers[0])
    for step in range(3):
        for head, optimizer in zip(heads, optimizers, strict=True):
            h, y = batch(step, dtype)
            head(h, y, key=sx.Key(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_accumulated_backwards_are_projected_together():
    heads = [make_head(), make_head()]
    heads[0].fuse_optimizer(sx.optim.RowSGD(heads[0].parameters(), lr=0.1), accumulate=2)
    plain = sx.optim.RowSGD(heads[1].parameters(), lr=0.1)
    for step in range(2):
        for head in heads:
            h, y = batch(step)
            head(h, y, key=sx.Key(step)).backward()
    plain.step()
    torch.testing.assert_close(heads[0].weight, heads[1].weight)


def test_a_fused_head_takes_no_second_loss_off_the_sphere():
    head = make_head()
    head.fuse_optimizer(sx.optim.RowSGD(head.parameters(), lr=0.1))
    h, y = batch()
    other = sx.functional.sampled_softmax(h, head.weight, y, y[:3], torch.zeros(3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="must all have normalize=True"):
        (head(h, y) + other).backward()


def test_exact_answers_are_those_of_cosines():
    head = make_head(MARGINS["arc"]).eval()
    with torch.no_grad():
        head.weight[5] = 0
    h, y = batch()
    cosine = F.normalize(h) @ F.normalize(head.weight).T
    logits = (8.0 * cosine).detach()
    torch.testing.assert_close(head.scores(h), logits)
    torch.testing.assert_close(head.log_prob(h), logits.log_softmax(1))
    torch.testing.assert_close(head(h, y), F.cross_entropy(logits, y))  # without a margin
    values, ids = head.topk(h, 4)
    torch.testing.assert_close(values, logits.topk(4)[0])
    assert torch.equal(ids, logits.topk(4)[1])
    some = torch.arange(20).expand(BATCH, -1)
    torch.testing.assert_close(head.topk(h, 3, candidates=some)[0], logits[:, :20].topk(3)[0])


def test_exact_answers_do_not_depend_on_the_chunk():
    head = make_head(dtype=torch.float32).eval()
    h, _ = batch(dtype=torch.float32)
    torch.testing.assert_close(head.log_prob(h, chunk_size=7), head.log_prob(h))


def test_the_full_softmax_trains_on_the_sphere():
    head = make_head(loss=sx.losses.FullSoftmax())
    h, y = batch()
    loss = head(h, y)
    loss.backward()
    leaves = [t.detach().clone().requires_grad_() for t in (h, head.weight)]
    want = F.cross_entropy(8.0 * (F.normalize(leaves[0]) @ F.normalize(leaves[1]).T), y)
    want.backward()
    torch.testing.assert_close(loss, want)
    for ours, theirs in zip((h, head.weight), leaves, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_many_draws_with_log_q_estimate_the_full_softmax():
    torch.manual_seed(0)
    full = make_head(loss=sx.losses.FullSoftmax(), reduction="none")
    head = make_head(reduction="none", shared=True)
    head.num_samples = 200_000
    h, y = batch()
    torch.testing.assert_close(head(h, y, key=sx.Key(0)), full(h, y), atol=0.02, rtol=0.02)
    off = make_head(reduction="none", shared=True, loss=sx.losses.SampledSoftmax(corrected=False))
    off.num_samples = 200_000
    assert float((off(h, y, key=sx.Key(0)) - full(h, y)).detach().min()) > 1.0


def test_the_uncorrected_form_is_a_softmax_over_what_was_drawn():
    head, key = (
        make_head(loss=sx.losses.SampledSoftmax(corrected=False, margin=MARGINS["cos"]), shared=True),
        torch.tensor([1, 0]),
    )
    h, y = batch()
    draw = head.sampler.sample(h, DRAWS, shared=True, key=key)
    draw = sx.Draw(draw.ids, torch.full_like(draw.log_q, -math.log(DRAWS)))
    torch.testing.assert_close(head(h, y, key=key), dense_loss(h, head.weight, y, draw, 8.0, MARGINS["cos"]))


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("shared", [False, True])
def test_a_learned_scale_has_the_gradient_of_the_dense_loss(margin, shared):
    head, key = make_head(MARGINS[margin], learn_scale=True, shared=shared), torch.tensor([3, 0])
    assert head.scale == 1.0
    assert "log_scale" in head.state_dict()
    h, y = batch()
    head(h, y, key=key).backward()
    draw = head.sampler.sample(h, DRAWS, shared=shared, key=key, exclude=None if shared else y)
    leaves = [t.detach().clone().requires_grad_() for t in (h, head.weight, head.log_scale)]
    dense_loss(leaves[0], leaves[1], y, draw, leaves[2].exp(), MARGINS[margin]).backward()
    for ours, theirs in zip((h, head.weight, head.log_scale), leaves, strict=True):
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)
    logits = 8.0 * (F.normalize(h) @ F.normalize(head.weight).T)
    torch.testing.assert_close(head.eval().scores(h), logits.detach())


def test_a_learned_scale_without_a_sphere():
    head = sx.SampledClassifier(DIM, CLASSES, loss="full_softmax", scale=2.0, learn_scale=True)
    h, y = batch(dtype=torch.float32)
    head(h, y).backward()
    assert float(head.log_scale.grad) != 0
    copied = copy.deepcopy(head)
    copied.load_state_dict(head.state_dict())
    torch.testing.assert_close(copied.eval()(h, y), head.eval()(h, y))


def test_a_learned_scale_starts_where_it_was_told_to_after_a_move_from_the_meta_device():
    head = make_head(device="meta", learn_scale=True).to_empty(device="cpu")
    head.reset_parameters()
    assert float(head.log_scale.detach().exp()) == pytest.approx(8.0)


@pytest.mark.parametrize("shared", [False, True])
def test_zero_rows_are_defined(shared):
    head = make_head(MARGINS["arc"], shared=shared, dtype=torch.float32)
    h, y = batch(dtype=torch.float32)
    with torch.no_grad():
        h[2] = 0
        head.weight[y[1]] = 0
    head(h, y).backward()
    assert bool(h.grad.isfinite().all())
    assert bool(head.weight.grad.to_dense().isfinite().all())
    assert not bool(h.grad[2].any())
    assert not bool(head.weight.grad.to_dense()[y[1]].any())
    assert bool(head.eval().log_prob(h).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_train(dtype):
    head = make_head(MARGINS["arc"], dtype=dtype)
    wide = make_head(MARGINS["arc"], dtype=torch.float64)
    wide.load_state_dict(head.state_dict())
    h, y = batch(dtype=dtype)
    loss = head(h, y, key=sx.Key(1))
    loss.backward()
    other = h.detach().double().requires_grad_()
    want = wide(other, y, key=sx.Key(1))
    want.backward()
    torch.testing.assert_close(loss.double(), want, atol=0.05, rtol=0.02)
    torch.testing.assert_close(h.grad.double(), other.grad, atol=0.05, rtol=0.05)


def test_a_compiled_step():
    head = make_head(MARGINS["arc"], dtype=torch.float32)
    compiled = torch.compile(head, backend="aot_eager", dynamic=True)
    h, y = batch(dtype=torch.float32)
    plain = head(h, y, key=sx.Key(1))
    plain.backward()
    want, wanted = head.weight.grad.to_dense(), h.grad
    head.weight.grad = h.grad = None
    found = compiled(h, y, key=sx.Key(1))
    found.backward()
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(head.weight.grad.to_dense(), want)
    torch.testing.assert_close(h.grad, wanted)


class _Largest(TorchDispatchMode):
    """The largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.layout is torch.strided and not func.is_view:
                self.numbers = max(self.numbers, t.numel())
        return out


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_no_step_makes_a_tensor_of_the_table_or_of_the_gathered_rows(shared, fused):
    classes, dim, rows, draws = 50_000, 32, 16, 64
    head = sx.SampledClassifier(
        dim, classes, sx.samplers.Uniform(classes), draws, sx.losses.SampledSoftmax(margin=MARGINS["arc"]),
        normalize=True, scale=16.0, shared=shared,
    )  # fmt: skip
    if fused:
        head.fuse_optimizer(sx.optim.RowAdagrad([head.weight], lr=0.1))
    h, y = torch.randn(rows, dim, requires_grad=True), torch.randint(classes, (rows,))
    head(h, y).backward()
    with _Largest() as seen:
        head(h, y).backward()
    # Unfused, the gradient rows themselves are that large.
    assert seen.numbers <= (rows * draws * dim // 2 if fused else rows * (draws + 1) * dim)


# ------------------------------------------------------------------------------------------------ refused
@pytest.mark.parametrize(
    "numbers", [(0.9, 0, 0), (5, 0, 0), (1, -0.1, 0), (1, 2.0, 0), (1, 0, -0.1), (1, 0, 1.5), (1, math.nan, 0)]
)
def test_margins_out_of_range(numbers):
    with pytest.raises(ValueError, match="Margin: m"):
        sx.losses.Margin(*numbers)


def test_what_does_not_go_together():
    uniform = sx.samplers.Uniform(CLASSES)
    arc = sx.losses.SampledSoftmax(margin=MARGINS["arc"])
    with pytest.raises(ValueError, match="normalize must be True with a margin"):
        sx.SampledClassifier(DIM, CLASSES, uniform, 5, arc)
    with pytest.raises(ValueError, match="normalize must be False with NCE"):
        sx.SampledClassifier(DIM, CLASSES, uniform, 5, "nce", normalize=True)
    with pytest.raises(ValueError, match="bias must be False with learn_scale"):
        sx.SampledClassifier(DIM, CLASSES, uniform, 5, bias=True, learn_scale=True)
    with pytest.raises(ValueError, match="bias must be False with normalize"):
        sx.SampledClassifier(DIM, CLASSES, uniform, 5, bias=True, normalize=True)
    with pytest.raises(ValueError, match="scale must be above 0"):
        sx.SampledClassifier(DIM, CLASSES, uniform, 5, bias=False, learn_scale=True, scale=-1.0)
    with pytest.raises(ValueError, match="absolute must be False"):
        sx.losses.SampledSoftmax(absolute=True, margin=MARGINS["arc"])
    with pytest.raises(TypeError, match="margin must be a Margin"):
        sx.losses.SampledSoftmax(margin=0.5)  # type: ignore[arg-type]
    head = make_head()
    head.normalize = False
    head.loss = arc
    with pytest.raises(ValueError, match="normalize must be True with a margin"):
        head(*batch())
    h, y = batch()
    with pytest.raises(ValueError, match="normalize must be True with a margin"):
        sx.functional.sampled_softmax(
            h, head.weight, y, y[:2], torch.zeros(2, dtype=torch.float64), margin=MARGINS["arc"]
        )


def test_elsewhere_a_head_on_the_sphere_is_refused():
    head = make_head()
    with pytest.raises(ValueError, match="diagnose: head must have normalize=False"):
        sx.diagnostics.diagnose(head, torch.randn(20, DIM, dtype=torch.float64))


def test_a_table_divided_outside_is_told_of_normalize():
    weight = torch.randn(CLASSES, DIM, requires_grad=True)
    h, y = batch(dtype=torch.float32)
    arguments = (y, torch.arange(5), torch.zeros(5))
    with pytest.raises(ValueError, match="normalize=True"):
        sx.functional.sampled_softmax(h, F.normalize(weight), *arguments)
    sx.functional.sampled_softmax(h, F.normalize(weight), *arguments, sparse=False).backward()
    dense, weight.grad = weight.grad, None
    sx.functional.sampled_softmax(F.normalize(h), weight, *arguments, normalize=True).backward()
    assert weight.grad.is_sparse
    assert dense is not None
