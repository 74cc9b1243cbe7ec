"""Row updates whose rate and step count are tensors, and the loss scale that a backward takes out of class rows."""

from __future__ import annotations

import math

import pytest
import torch

from samplex_cuda._checks import op_error
from samplex_cuda.ops.loss_types import Form
from samplex_cuda.ops.sampled_softmax import sampled_softmax
from samplex_cuda.ops.saved_loss import pack_saved
from samplex_cuda.optim import rules
from samplex_cuda.testing import assert_close

OPS = torch.ops.samplex
LR, DECAY, EPS, LR_DECAY, BETAS = 0.05, 0.01, 1e-6, 0.3, (0.8, 0.95)
RULES = ["sgd", "nesterov", "adagrad", "row_adagrad", "adam", "adamw"]
STATES = {"sgd": 0, "adam": 2, "adamw": 2}


def host(rule: str, lr: float, step: int) -> rules.Rule:
    """The numbers of a step, as the optimizers compute them."""
    if rule in ("sgd", "nesterov"):
        return rules.sgd(lr, 0.0 if rule == "sgd" else BETAS[0], DECAY, rule == "nesterov")
    if rule in ("adagrad", "row_adagrad"):
        return rules.adagrad(lr / (1.0 + (step - 1) * LR_DECAY), EPS, DECAY, rule == "row_adagrad")
    return rules.adam(lr, BETAS, EPS, DECAY, rule == "adamw", step)


def constants(rule: str, lr: float) -> tuple[float, ...]:
    """What does not change from step to step; `lr` is used only where none is given as a tensor."""
    if rule in ("adam", "adamw"):
        made = rules.adam(lr, BETAS, EPS, DECAY, rule == "adamw", 1)._replace(lr=lr)
        return rules.constants(made, DECAY if rule == "adamw" else 0.0)
    return rules.constants(host(rule, lr, 1), lr_decay=LR_DECAY if "adagrad" in rule else 0.0)


def tables(rule: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor | None]:
    """A weight and its two states."""
    g = torch.Generator().manual_seed(3)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    made: list[torch.Tensor | None] = [torch.randn(shape, generator=g).to(dtype)]
    held = shape[:1] if rule == "row_adagrad" else shape
    made += [(torch.rand(held, generator=g) + 0.1).to(acc) for _ in range(STATES.get(rule, 1))]
    return [*(t.to(device) for t in made if t is not None), None, None][:3]


def copies(found: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if t is None else t.clone() for t in found]


def same(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_numbers_made_on_the_device_are_those_of_the_host(backend, rule, dtype):
    """Ten steps with a rate that changes, from step 1 and from step 10^6 on; on the CPU the same bits."""
    device = backend.device
    g = torch.Generator().manual_seed(1)
    for first in (0, 1_000_000):
        live = tables(rule, (14, 12), dtype, device)
        plain = copies(live)
        lr = torch.zeros((), dtype=torch.float64 if first else torch.float32, device=device)
        step = torch.full((), float(first), device=device)
        for number in range(first + 1, first + (4 if backend.emulated else 11)):
            ids = torch.randperm(14, generator=g)[:5].to(device)
            rows = torch.randn(5, 12, generator=g).to(device=device, dtype=dtype)
            lr.fill_(LR / number)
            OPS.row_apply_(*live, ids, rows, None, None, constants(rule, 9.9), lr, step)
            OPS.row_apply_(*plain, ids, rows, None, None, host(rule, float(lr), number))
            assert step == number
            for name, a, b in zip("wst", live, plain, strict=True):
                if backend.name == "cpu" or a is None:
                    assert a is b is None or torch.equal(a, b)
                else:  # nvcc's pow is not glibc's: 1e-15 of a rate
                    assert_close(name, a.cpu(), b.cpu().double(), b.cpu(), magnitude=2.0)


@pytest.mark.parametrize("rule", ["sgd", "row_adagrad", "adamw"])
def test_entries_with_a_bias(backend, rule):
    """`row_update_`: weight and bias with rates and counts of their own."""
    device = backend.device
    of_bias = "adagrad" if rule == "row_adagrad" else rule
    g = torch.Generator().manual_seed(2)
    e = [torch.randint(9, (4, 1), generator=g), torch.randn(4, 1, generator=g), torch.randn(4, 6, generator=g)]
    e += [torch.randint(9, (4, 3), generator=g), torch.randn(4, 3, generator=g), e[2], None]
    e = [None if t is None else t.to(device) for t in e]
    live = tables(rule, (9, 6), torch.float32, device) + tables(of_bias, (9,), torch.float32, device)
    plain = copies(live)
    rate, step = torch.tensor([0.2, 0.1], device=device), torch.tensor([4.0, 7.0], device=device)
    for number in range(2):
        OPS.row_update_(
            *live, *e, None, constants(rule, 9.9), constants(of_bias, 9.9), rate[0], step[0], rate[1], step[1]
        )
        numbers = host(rule, float(rate[0]), 5 + number), host(of_bias, float(rate[1]), 8 + number)
        OPS.row_update_(*plain, *e, None, *numbers)
    assert step.tolist() == [6.0, 9.0]
    for a, b in zip(live, plain, strict=True):
        if a is not None:
            assert torch.equal(a, b) if backend.name == "cpu" else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    # Without a tensor the rate is the constant.
    OPS.row_update_(*live, *e, None, constants(rule, 0.3), constants(of_bias, 0.4), None, step[0], None, step[1])
    OPS.row_update_(*plain, *e, None, host(rule, 0.3, 7), host(of_bias, 0.4, 10))
    assert torch.allclose(live[0], plain[0], rtol=1e-5, atol=1e-6)
    assert torch.allclose(live[3], plain[3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_found_inf_leaves_everything_as_it_is(backend, rule):
    device = backend.device
    live = tables(rule, (9, 6), torch.float32, device)
    before = copies(live)
    rows, step, found = torch.ones(9, 6, device=device), torch.tensor(2.0, device=device), torch.ones((), device=device)
    OPS.row_apply_(*live, None, rows, None, None, constants(rule, 0.1), None, step, found)
    ids = torch.arange(9, device=device)
    e = [ids.view(9, 1), torch.ones(9, 1, device=device), rows, ids[:0].view(0, 1), None, rows[:0], None]
    OPS.row_update_(*live, None, None, None, *e, None, constants(rule, 0.1), [], None, step, None, None, found)
    assert same(live, before)
    assert step == 2
    OPS.row_apply_(*live, None, rows, None, None, constants(rule, 0.1), None, step, found.zero_())
    assert not same(live, before)
    assert step == 3


def test_no_rows_count_as_a_step(backend):
    weight, step = torch.ones(3, 2, device=backend.device), torch.zeros((), device=backend.device)
    none = torch.zeros(0, dtype=torch.int64, device=backend.device)
    OPS.row_apply_(weight, None, None, none, weight[:0], None, None, constants("sgd", 0.1), None, step)
    assert step == 1


def test_opcheck_live(backend):
    device = backend.device
    live = tables("adam", (6, 4), torch.float32, device)
    step, lr = torch.zeros((), device=device), torch.tensor(0.1, dtype=torch.float64, device=device)
    numbers, found = constants("adam", 0.1), torch.zeros((), device=device)
    torch.library.opcheck(
        OPS.row_apply_.default, (*live, None, torch.ones(6, 4, device=device), None, None, numbers, lr, step, found)
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rule": host("adam", 0.1, 1)}, "rule must have 11 numbers, got 9"),
        ({"step": None}, "rule must have 9 numbers, got 11"),
        ({"step": None, "rule": host("adam", 0.1, 1)}, "lr must be None without step, got a tensor"),
        ({"step": torch.zeros((), dtype=torch.int64)}, "step must be one number = [] float32 contiguous on cpu"),
        ({"lr": torch.zeros(2)}, "lr must be one number = [1] float32 contiguous on cpu, got [2] float32 on cpu"),
        ({"lr": torch.zeros((), dtype=torch.bfloat16)}, "lr must be one number = [] float32 contiguous"),
        ({"found_inf": torch.zeros((), dtype=torch.bool)}, "found_inf must be one number = [] float32 contiguous"),
    ],
)  # fmt: skip
def test_bad_live_numbers(change, text):
    args = {"rule": constants("adam", 0.1), "lr": torch.tensor(0.1), "step": torch.tensor(0.0), "found_inf": None}
    live = tables("adam", (3, 2), torch.float32, torch.device("cpu"))
    OPS.row_apply_(*live, None, torch.ones(3, 2), None, None, *args.values())
    with pytest.raises(RuntimeError) as caught:
        OPS.row_apply_(*live, None, torch.ones(3, 2), None, None, *(args | change).values())
    assert str(op_error(caught.value)).startswith(f"row_apply_: {text}")


def test_the_bias_counts_with_the_weight():
    live = tables("sgd", (3, 2), torch.float32, torch.device("cpu"))
    ids, rows, step = torch.tensor([[1]]), torch.ones(1, 2), torch.tensor(0.0)
    e = [ids, torch.ones(1, 1), rows, ids[:0], None, rows[:0], None]
    with pytest.raises(RuntimeError, match="row_update_: bias_step must be given with weight_step, and not without"):
        OPS.row_update_(
            *live, torch.zeros(3), None, None, *e, None, constants("sgd", 0.1), host("sgd", 0.1, 1), None, step
        )


# ------------------------------------------------------------------------------------------------ the loss scale
def backward_of(h, shared, dtype, device, upstream, reduction=1, scale=None, found=None):
    """`loss_entries` of a small loss with an ignored row; the weight gradient in five tensors."""
    g = torch.Generator().manual_seed(4)
    weight = torch.randn(9, h.shape[1], generator=g).to(dtype).to(device)
    ids = torch.randint(9, (5,) if shared else (h.shape[0], 5), generator=g).to(device)
    target = torch.arange(h.shape[0], device=device)
    target[1] = -100
    log_q = torch.full(ids.shape, -2.0, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    _, _, saved = sampled_softmax(
        h, weight, target, ids, log_q, None, None, None, None, 1.0, 0.0, -100, reduction, False, True, False, True
    )  # fmt: skip
    shape = () if reduction else (h.shape[0],)
    grad = torch.full(shape, upstream, dtype=log_q.dtype, device=device)
    return OPS.loss_entries(grad, None, h, target, ids, saved, reduction, False, True, False, scale, found)


def hidden(dtype, device):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(5)).to(dtype).to(device)


@pytest.mark.parametrize("reduction", [0, 1])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_scale_is_taken_out_of_class_rows_alone(backend, dtype, shared, reduction):
    h, device = hidden(dtype, backend.device), backend.device
    found, scale = torch.zeros((), device=device), torch.tensor(1024.0, device=device)
    want = backward_of(h, shared, dtype, device, 1.0, reduction)
    got = backward_of(h, shared, dtype, device, 1024.0, reduction, scale, found)
    scaled = backward_of(h, shared, dtype, device, 1024.0, reduction)
    assert torch.equal(got[0], scaled[0])  # h: the encoder's optimizer unscales it
    assert all(torch.equal(a, b) for a, b in zip(got[1:], want[1:], strict=True))
    assert found == 0


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_is_not_finite_is_found(backend, dtype, shared):
    device = backend.device
    scale = torch.tensor(1024.0, device=device)
    for row, column, value, upstream, expected in [
        (0, 0, 1.0, math.inf, 1.0),
        (0, 0, 1.0, math.nan, 1.0),
        (2, 5, math.nan, 1.0, 1.0),
        (3, 1, math.inf, 1.0, 1.0),
        (1, 1, math.inf, 1.0, 0.0),  # of a row that is ignored
        (1, 1, math.nan, 1.0, 0.0),
        (0, 0, 1.0, 0.0, 0.0),
    ]:
        h, found = hidden(dtype, device), torch.zeros((), device=device)
        h[row, column] = value
        backward_of(h, shared, dtype, device, upstream, 1, scale, found)
        assert float(found) == expected, (row, column, value, upstream)
        backward_of(hidden(dtype, device), shared, dtype, device, 1.0, 1, scale, found)
        assert float(found) == expected  # it stays


@pytest.mark.parametrize(("size", "expected"), [(1e37, 0.0), (3e37, 1.0)])
def test_sums_that_may_overflow_are_found(backend, size, expected):
    """Each product is finite; the sum of 24 of them need not be."""
    device = backend.device
    h, found = torch.full((4, 6), size, device=device), torch.zeros((), device=device)
    coef, row = torch.ones(4, 6, device=device), torch.ones(4, device=device)
    saved = pack_saved(row, row, coef, torch.ones(4, 6, device=device), Form(reduction=0)).saved
    target, ids = torch.arange(4, device=device), torch.ones(4, 5, dtype=torch.int64, device=device)
    OPS.loss_entries(row, None, h, target, ids, saved, 0, False, True, False, None, found)
    assert float(found) == expected
