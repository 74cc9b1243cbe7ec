"""Class rows on the sphere, margins and weighted targets: values and gradients against the specification."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from loss_cases import acc, check_case, leaf, name_of, pairwise
from softmax_cases import Case, make_case

import samplex_cuda as sx
from samplex_cuda.ops.fused_loss import run_loss
from samplex_cuda.ops.loss_types import Form, Inputs
from samplex_cuda.reference.sampled_softmax import sampled_softmax as reference

MARGINS = {
    "none": None,
    "arc": sx.losses.ArcFace(0.5),
    "cos": sx.losses.CosFace(0.35),
    "all": sx.losses.Margin(1.3, 0.4, 0.2),
    "sphere": sx.losses.Margin(m1=3.0),
}


@dataclasses.dataclass
class SphereCase(Case):
    """A call of the op itself: `h` is not on the sphere, and the margin works on its length."""

    margin: Any = None
    normalize: bool = True
    with_lse: bool = True

    def outputs(self, h, weight, bias, *, sparse=True) -> dict[str, torch.Tensor]:
        o = self.options
        offsets, known = o.get("positives", (None, None))
        loss = sx.losses.SampledSoftmax(o["label_smoothing"], o["absolute"], self.margin)
        x = Inputs(h, weight, bias, self.target, self.ids, self.log_q, o.get("class_weight"), offsets, known)
        x = x._replace(target_weight=o.get("target_weight"))
        form = Form(o["scale"], o.get("ignore_index", -100), 0, sparse, self.with_lse, self.normalize)
        made = run_loss(loss, x, form)
        return dict(zip(("loss", "lse"), made[: 1 + self.with_lse], strict=False))

    def expected(self, h, weight, bias) -> dict[str, torch.Tensor]:
        margin = () if self.margin is None else self.margin.numbers()
        loss, lse, _ = reference(
            h, weight, self.target, self.ids, self.log_q, bias, normalize=self.normalize, margin=margin, **self.options
        )
        return {"loss": loss, "lse": lse} if self.with_lse else {"loss": loss}

    def bound(self) -> float:
        steep = 1.0 if self.margin is None else 4.0 * self.margin.m1
        return steep * (super().bound() + 2.0)


def sphere_case(margin="none", with_lse=True, weighted=False, normalize=True, **row: Any) -> SphereCase:
    made = make_case(**row)
    if weighted:
        g = torch.Generator().manual_seed(4)
        given = torch.rand(made.target.shape, generator=g).to(acc(made.weight.dtype))
        made.options["target_weight"] = given / max(given.sum(-1).mean().item(), 1.0)
    case = SphereCase(**vars(made))
    case.margin, case.with_lse, case.normalize = MARGINS[margin], with_lse, normalize
    return case


GRID = pairwise({
    "dim": [3, 7, 8, 16, 17, 32, 64, 100, 128, 130, 256, 512, 1025],
    "samples": [0, 1, 2, 33, 64, 65],
    "dtype": [torch.float32, torch.bfloat16, torch.float16, torch.float64],
    "ignore": ["none", "padding", "class", "beyond"],
    "rows": [0, 1, 5],
    "targets": [1, 3],
    "shared": [False, True],
    "scale": [1.0, 2.5],
    "margin": ["none", "arc", "cos", "all", "sphere"],
    "smoothing": [0.0, 0.1],
    "class_weight": [False, True],
    "positives": [False, True],
    "with_lse": [False, True],
    "weighted": [False, True],
})  # fmt: skip


@pytest.mark.parametrize("row", GRID, ids=name_of)
def test_values_and_gradients_match_the_reference(backend, row):
    check_case(sphere_case(**row), backend)


USUAL = pairwise({
    "dim": [8, 32, 48, 64, 128, 512],
    "samples": [1, 7, 8, 9, 64, 65],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "rows": [1, 40],
    "shared": [False, True],
    "margin": ["none", "arc", "cos", "all"],
    "ignore": ["none", "padding"],
})  # fmt: skip


@pytest.mark.parametrize("row", USUAL, ids=name_of)
def test_the_usual_form_without_its_second_output(simd_level, row):
    class Cpu:
        device = torch.device("cpu")

    check_case(sphere_case(with_lse=False, **row), Cpu)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("targets", [1, 3])
def test_weighted_targets_without_a_sphere(backend, shared, targets):
    check_case(sphere_case(normalize=False, weighted=True, targets=targets, shared=shared, smoothing=0.1), backend)
    check_case(sphere_case(normalize=False, weighted=True, targets=targets, shared=shared, absolute=True), backend)


def test_an_absolute_logit_on_the_sphere(backend):
    check_case(sphere_case(absolute=True), backend)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("margin", ["none", "arc", "all"])
def test_gradcheck(shared, margin):
    case = sphere_case(margin, rows=4, samples=6, dim=5, shared=shared, dtype=torch.float64, targets=2)
    leaves = leaf(case.h), leaf(case.weight)

    def loss(h, weight):
        return case.outputs(h, weight, None, sparse=False)["loss"].sum()

    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("margin", ["none", "arc"])
def test_a_row_of_zeros_has_cosine_zero_and_no_gradient(backend, shared, margin):
    case = sphere_case(margin, rows=6, samples=12, dim=16, classes=30, shared=shared)
    zero = int(case.ids[3] if shared else case.ids[2, 3])
    case.weight[zero] = 0
    case.weight[case.target[4]] = 0
    c = case.to(backend.device)
    h, weight = leaf(c.h), leaf(c.weight)
    made = c.outputs(h, weight, None)
    torch.testing.assert_close(made["loss"].cpu(), case.expected(case.h, case.weight, None)["loss"])
    made["loss"].sum().backward()
    grad = weight.grad.to_dense()
    assert bool(grad.isfinite().all())
    assert bool(h.grad.isfinite().all())
    assert not bool(grad[zero].any())
    assert not bool(grad[case.target[4]].any())
    assert bool(grad.any())


def test_a_nan_row_stays_alone(backend):
    case = sphere_case("arc", rows=5, samples=9, dim=16, classes=400)
    case.h[2, 3] = math.nan
    c = case.to(backend.device)
    loss = c.outputs(leaf(c.h), leaf(c.weight), None)["loss"].cpu()
    assert bool(loss[2].isnan())
    others = torch.arange(5) != 2
    want = case.expected(case.h, case.weight, None)["loss"]
    torch.testing.assert_close(loss[others], want[others])


@pytest.mark.parametrize(("m1", "m2", "m3"), [(1.0, 0.5, 0.0), (3.0, 0.2, 0.1)])
def test_the_margin_falls_over_the_whole_circle(backend, m1, m2, m3):
    angle = torch.linspace(0.0, math.pi, 200, dtype=torch.float64)
    h = torch.stack([angle.cos(), angle.sin()], 1).to(backend.device)
    weight = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64, device=backend.device)
    target = torch.zeros(200, dtype=torch.int64, device=backend.device)
    loss = sx.functional.sampled_softmax(
        h, weight, target, target[:1] + 1, torch.zeros(1, dtype=torch.float64, device=h.device), reduction="none",
        normalize=True, margin=sx.losses.Margin(m1, m2, m3),
    )  # fmt: skip
    s = -(loss.cpu().expm1()).log()  # loss = log(1 + exp(0 - s)), the other row is zero
    assert bool((s.diff() < 0).all())
    inside = m1 * angle + m2 < math.pi
    torch.testing.assert_close(s[inside], (m1 * angle + m2).cos()[inside] - m3, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_angle_zero_gradients_are_finite(backend, dtype):
    weight = torch.randn(4, 8, dtype=dtype, generator=torch.Generator().manual_seed(0)).to(backend.device)
    h, table = leaf(weight[:2] * 3.0), leaf(weight)
    target, ids = torch.tensor([0, 1], device=h.device), torch.tensor([[2, 3], [3, 2]], device=h.device)
    loss = sx.functional.sampled_softmax(
        h, table, target, ids, torch.zeros(2, 2, dtype=dtype, device=h.device), normalize=True,
        margin=sx.losses.ArcFace(0.5), scale=30.0,
    )  # fmt: skip
    loss.backward()
    assert bool(h.grad.isfinite().all())
    assert bool(table.grad.to_dense().isfinite().all())
    assert float(h.grad.abs().max()) < 100.0
