"""`sx.optim`: against torch.optim where every row is touched and on COO gradients, lazy semantics, state, bad input."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import samplex_cuda as sx

CLASSES, DIM = 9, 5
PAIRS = {
    "sgd": (sx.optim.RowSGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.02}),
    "momentum": (sx.optim.RowSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02}),
    "nesterov": (sx.optim.RowSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (
        sx.optim.RowAdagrad,
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.3, "weight_decay": 0.02, "initial_accumulator_value": 0.5, "eps": 1e-6},
    ),
    "adam": (sx.optim.RowAdam, torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.02, "eps": 1e-6}),
    "adamw": (
        lambda p, **k: sx.optim.RowAdam(p, decoupled_weight_decay=True, **k),
        torch.optim.AdamW,
        {"lr": 0.1, "weight_decay": 0.2},
    ),
}


def tables(dtype=torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in ((CLASSES, DIM), (CLASSES,))]


def gradient(p: torch.Tensor, step: int, *, sparse: bool, rows: list[int] | None = None) -> torch.Tensor:
    g = torch.Generator().manual_seed(10 + step)
    ids = torch.tensor(list(range(p.shape[0])) if rows is None else rows)
    values = torch.randn(len(ids), *p.shape[1:], generator=g).to(p.dtype)
    if sparse:
        return torch.sparse_coo_tensor(ids[None], values, p.shape, is_coalesced=True, check_invariants=False)
    return torch.zeros_like(p).index_copy_(0, ids, values)


def states(optimizer, params) -> list[torch.Tensor]:
    return [
        v for p in params for k, v in sorted(optimizer.state[p].items()) if isinstance(v, torch.Tensor) and k != "step"
    ]


# ------------------------------------------------------------------------------------------------ the same as torch's
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_all_rows_touched_is_torchs_dense_optimizer(backend, name, sparse):
    make, torchs, options = PAIRS[name]
    ours, theirs = [p.detach().to(backend.device).requires_grad_() for p in tables()], tables()
    mine, other = make(ours, **options), torchs(theirs, **options)
    for step in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = gradient(q, step, sparse=sparse).to(backend.device)
            q.grad = gradient(q, step, sparse=False)
        mine.step()
        other.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-10, atol=1e-12)
    for p, q in zip(states(mine, ours), states(other, theirs), strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "torchs", "options"),
    [
        (sx.optim.RowSGD, torch.optim.SGD, {"lr": 0.1}),
        (sx.optim.RowAdagrad, torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
        # SparseAdam adds eps before the bias correction: with a small one they agree.
        (sx.optim.RowAdam, torch.optim.SparseAdam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-14}),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_some_rows_touched_is_torchs_optimizer_of_coo_gradients(make, torchs, options):
    ours, theirs = tables()[:1], tables()[:1]
    mine, other = make(ours, **options), torchs(theirs, **options)
    for step, rows in enumerate(([1, 4], [4], [], [0, 2, 8], [4, 5])):
        ours[0].grad, theirs[0].grad = (gradient(theirs[0], step, sparse=True, rows=rows) for _ in range(2))
        mine.step()
        other.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-9, atol=1e-12)


def test_uncoalesced_gradients_are_summed_first():
    p, q = tables()[0], tables()[0]
    ids, values = torch.tensor([[3, 1, 3]]), torch.randn(3, DIM, dtype=torch.float64)
    p.grad = torch.sparse_coo_tensor(ids, values, p.shape, check_invariants=False)
    q.grad = p.grad.to_dense()
    sx.optim.RowAdagrad([p]).step()
    torch.optim.Adagrad([q]).step()
    torch.testing.assert_close(p, q)


def test_a_head_trains_as_with_torchs_optimizer():
    """Sparse gradients of a loss, weight and bias, fp32."""
    heads = []
    for make in (sx.optim.RowAdagrad, torch.optim.Adagrad):
        torch.manual_seed(0)
        head = sx.SampledClassifier(8, 40, sx.samplers.Uniform(40), num_samples=6)
        optimizer, key = make(head.parameters(), lr=0.1), sx.Key(1)
        for step in range(3):
            g = torch.Generator().manual_seed(step)
            head(torch.randn(5, 8, generator=g), torch.randint(40, (5,), generator=g), key=key).backward()
            optimizer.step()
            optimizer.zero_grad()
        heads.append(head)
    torch.testing.assert_close(heads[0].weight, heads[1].weight)
    torch.testing.assert_close(heads[0].bias, heads[1].bias)


# ------------------------------------------------------------------------------------------------ lazy
@pytest.mark.parametrize("name", PAIRS)
def test_untouched_rows_and_their_state_rest(name):
    make, _, options = PAIRS[name]
    (p,) = tables()[:1]
    optimizer = make([p], **options)
    p.grad = gradient(p, 0, sparse=True)
    optimizer.step()
    before, kept = p.detach().clone(), [s.clone() for s in states(optimizer, [p])]
    p.grad = gradient(p, 1, sparse=True, rows=[2, 7])
    optimizer.step()
    rest = [0, 1, 3, 4, 5, 6, 8]
    assert torch.equal(p[rest], before[rest])
    assert not p[[2, 7]].eq(before[[2, 7]]).any()
    for old, new in zip(kept, states(optimizer, [p]), strict=True):
        assert torch.equal(old[rest], new[rest])


def test_the_step_of_bias_correction_is_the_parameters():
    """A row first touched at step 3 is corrected for step 3."""
    p = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    optimizer = sx.optim.RowAdam([p], lr=0.1, betas=(0.5, 0.5), eps=0.0)
    for _ in range(2):
        p.grad = torch.sparse_coo_tensor(
            torch.tensor([[0]]), torch.ones(1, 2).double(), p.shape, check_invariants=False
        )
        optimizer.step()
    p.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2).double(), p.shape, check_invariants=False)
    optimizer.step()
    correct = 1 - 0.5**3
    want = -0.1 * (0.5 / correct) / math.sqrt(0.5 / correct)
    torch.testing.assert_close(p[1], torch.full((2,), want).double())


def test_rowwise_adagrad_keeps_one_number_a_row():
    p, q = tables()
    optimizer = sx.optim.RowAdagrad([p, q], lr=0.1, rowwise=True)
    p.grad, q.grad = gradient(p, 0, sparse=True, rows=[3]), gradient(q, 0, sparse=True, rows=[3])
    g, before, value = p.grad.to_dense()[3], p.detach()[3].clone(), q.detach().clone()
    optimizer.step()
    total = optimizer.state[p]["sum"]
    assert total.shape == (CLASSES,)
    torch.testing.assert_close(total[3], (g * g).mean())
    torch.testing.assert_close(p[3], before - 0.1 * g / (total[3].sqrt() + 1e-10))
    torch.testing.assert_close(q[3], value[3] - 0.1 * q.grad.to_dense()[3].sign())  # of one number: Adagrad


# ------------------------------------------------------------------------------------------------ torch's machinery
def test_schedulers_groups_and_closures():
    weight, bias = tables()
    optimizer = sx.optim.RowSGD([{"params": [weight]}, {"params": [bias], "lr": 0.01}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    other = [t.detach().clone().requires_grad_() for t in (weight, bias)]
    theirs = torch.optim.SGD([{"params": [other[0]]}, {"params": [other[1]], "lr": 0.01}], lr=0.1)
    same = torch.optim.lr_scheduler.StepLR(theirs, 1, gamma=0.5)
    for step in range(3):
        for p, q in zip((weight, bias), other, strict=True):
            p.grad, q.grad = gradient(q, step, sparse=True), gradient(q, step, sparse=False)
        assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
        theirs.step()
        schedule.step()
        same.step()
    torch.testing.assert_close(weight, other[0])
    torch.testing.assert_close(bias, other[1])
    extra = torch.zeros(3, 2, requires_grad=True)
    optimizer.add_param_group({"params": [extra], "momentum": 0.5})
    assert optimizer.state[extra]["momentum_buffer"].shape == (3, 2)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=3, cycle_momentum=False)


@pytest.mark.parametrize("name", ["momentum", "adagrad", "adam"])
def test_state_dict_round_trip(name):
    make, _, options = PAIRS[name]
    params = [t.detach().bfloat16().requires_grad_() for t in tables(torch.float32)]
    optimizer = make(params, stochastic_rounding=True, key=sx.Key(4), **options)

    def run(optimizer, params, first, last):
        for step in range(first, last):
            for p in params:
                p.grad = gradient(p, step, sparse=True, rows=[1, 5])
            optimizer.step()

    run(optimizer, params, 0, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    twins = [p.detach().clone().requires_grad_() for p in params]
    other = make(twins, stochastic_rounding=True, key=sx.Key(99), **(options | {"lr": 7.0}))
    other.load_state_dict(saved)
    assert all(s.dtype == torch.float32 for s in states(other, twins))
    run(optimizer, params, 2, 4)
    run(other, twins, 2, 4)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(states(optimizer, params), states(other, twins), strict=True))
    saved_again = other.state_dict()["state"][0]
    for name, value in saved["state"][0].items():  # copied, not shared
        assert name == "step" or value.data_ptr() != saved_again[name].data_ptr()


def test_state_of_torchs_optimizer_can_be_loaded():
    p, q = tables()[0], tables()[0]
    theirs = torch.optim.Adagrad([q], lr=0.2, lr_decay=0.1)
    q.grad = gradient(q, 0, sparse=False)
    theirs.step()
    mine = sx.optim.RowAdagrad([p])
    mine.load_state_dict(theirs.state_dict())
    p.data.copy_(q.detach())
    p.grad, q.grad = gradient(p, 1, sparse=True), gradient(q, 1, sparse=False)
    mine.step()
    theirs.step()
    torch.testing.assert_close(p, q)


def test_state_of_another_shape_changes_nothing():
    p = torch.zeros(4, 3, requires_grad=True)
    optimizer = sx.optim.RowAdagrad([p], lr=0.5, initial_accumulator_value=2.0)
    wrong = sx.optim.RowAdagrad([torch.zeros(5, 3, requires_grad=True)], lr=0.1).state_dict()
    with pytest.raises(ValueError, match=r"sum of parameter 0 must be \[4, 3\], got \[5, 3\] float32"):
        optimizer.load_state_dict(wrong)
    adam = sx.optim.RowAdam([p]).state_dict()
    with pytest.raises(ValueError, match=r"sum of parameter 0 must be \[4, 3\], got None"):
        optimizer.load_state_dict(adam)
    with pytest.raises(ValueError, match=r"parameters by group must be \[1\], got \[2\]"):
        optimizer.load_state_dict(sx.optim.RowAdagrad(tables()).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[p]["sum"].eq(2).all()


def test_half_precision_weights_keep_wide_state_and_can_be_rounded_by_chance():
    """Steps far below half a unit: rounded to nearest they vanish, stochastically they add up."""
    moved = {}
    for by_chance in (False, True):
        p = torch.ones(400, 8, dtype=torch.bfloat16, requires_grad=True)
        optimizer = sx.optim.RowSGD([p], lr=1.0, stochastic_rounding=by_chance, key=sx.Key(2))
        for _ in range(50):
            p.grad = torch.full_like(p, -(2.0**-13))
            optimizer.step()
        moved[by_chance] = float(p.detach().float().mean()) - 1
    assert moved[False] == 0
    assert abs(moved[True] - 50 * 2.0**-13) < 0.2 * 50 * 2.0**-13
    weight = torch.ones(3, 2, dtype=torch.float16, requires_grad=True)
    assert sx.optim.RowAdam([weight]).state[weight]["exp_avg"].dtype == torch.float32


# ------------------------------------------------------------------------------------------------ clipping
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_grad_norm(norm_type, max_norm):
    ours, theirs = tables(torch.float32), tables(torch.float32)
    for step, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        p.grad = gradient(p, step, sparse=step == 0, rows=[1, 4])
        q.grad = gradient(q, step, sparse=False, rows=[1, 4])
    total = sx.optim.clip_grad_norm_(ours, max_norm, norm_type)
    want = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(total, want)
    assert ours[0].grad.is_sparse
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad.to_dense() if p.grad.is_sparse else p.grad, q.grad)


def test_clip_grad_norm_corners():
    p = torch.zeros(3, 2, requires_grad=True)
    assert sx.optim.clip_grad_norm_(p, 1.0) == 0
    p.grad = gradient(p, 0, sparse=True, rows=[])
    assert sx.optim.clip_grad_norm_([p], 1.0) == 0
    p.grad = torch.full_like(p, math.nan)
    with pytest.raises(RuntimeError, match="the norm of the gradients must be finite, got nan"):
        sx.optim.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)


# ------------------------------------------------------------------------------------------------ bad input
LEAF = torch.zeros(3, 2, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: sx.optim.RowSGD([LEAF], lr=0.0), ValueError, "RowSGD: lr must be finite and above 0, got 0.0"),
        (lambda: sx.optim.RowAdagrad([LEAF], lr=-1), ValueError, "RowAdagrad: lr must be finite and above 0, got -1"),
        (lambda: sx.optim.RowAdam([LEAF], lr=math.nan), ValueError, "RowAdam: lr must be finite and above 0, got nan"),
        (lambda: sx.optim.RowAdam([LEAF], lr="1e-3x"), ValueError, "lr must be finite and above 0, got '1e-3x'"),
        (lambda: sx.optim.RowSGD([LEAF], momentum=-0.1), ValueError, "must be finite and at least 0, got -0.1"),
        (lambda: sx.optim.RowSGD([LEAF], nesterov=True), ValueError, "momentum must be above 0 with nesterov, got 0.0"),
        (lambda: sx.optim.RowAdagrad([LEAF], eps=-1.0), ValueError, "eps must be finite and at least 0, got -1.0"),
        (lambda: sx.optim.RowAdam([LEAF], betas=(0.9, 1.0)), ValueError, "must be two numbers in [0, 1), got (0.9"),
        (lambda: sx.optim.RowSGD([LEAF * 2]), ValueError, "must be a leaf, got [3, 2] float32 on cpu, the result"),
        (lambda: sx.optim.RowSGD([torch.zeros(())]), ValueError, "[C] or [C, d] floating point, got [] float32"),
        (lambda: sx.optim.RowSGD([torch.zeros(1, 1, 1)]), ValueError, "[C] or [C, d] floating point, got [1, 1, 1]"),
        (lambda: sx.optim.RowSGD([torch.zeros(2).long()]), ValueError, "[C] or [C, d] floating point, got [2] int64"),
        (lambda: sx.optim.RowSGD([torch.zeros(2, 3).T]), ValueError, "dense and contiguous, got [3, 2] float32"),
        (lambda: sx.optim.RowSGD([3.0]), TypeError, "a parameter must be a Tensor, got float"),
        (lambda: sx.optim.RowSGD([LEAF], key=3), TypeError, "RowSGD: key must be a Key or None, got int"),
    ],
)  # fmt: skip
def test_bad_input(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


def test_bad_groups_and_steps_change_nothing():
    p = torch.zeros(3, 2, requires_grad=True)
    optimizer = sx.optim.RowSGD([p], lr=0.1)
    with pytest.raises(ValueError, match="lr must be finite and above 0"):
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    p.grad = torch.ones_like(p)
    optimizer.param_groups[0]["lr"] = -0.1
    with pytest.raises(ValueError, match="lr must be finite and at least 0 in a step"):
        optimizer.step()
    assert p.eq(0).all()
    optimizer.param_groups[0]["lr"] = 0.0  # where a schedule may end
    optimizer.step()
    assert p.eq(0).all()
    q = torch.zeros(3, 2, requires_grad=True)
    q.grad = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (3, 2), check_invariants=False)
    with pytest.raises(ValueError, match="must be sparse in the first dimension alone, got 2"):
        sx.optim.RowSGD([q]).step()


def test_a_step_is_seen_by_autograd():
    """A graph made before the step must not be differentiated after it."""
    p = torch.ones(3, 2, requires_grad=True)
    loss = (p * p).sum()
    optimizer = sx.optim.RowSGD([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_and_profilers_see_a_step():
    weight = torch.zeros(5, 2, requires_grad=True)
    optimizer = sx.optim.RowSGD([weight], lr=0.5)
    seen: list[tuple[str, bool]] = []

    def step() -> None:
        torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert seen == []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append(("before", bool(weight[1, 0] == -0.5)))),
        optimizer.register_step_post_hook(lambda *_: seen.append(("after", bool(weight[1, 0] == -1.0)))),
    ]
    step()
    assert seen == [("before", True), ("after", True)]
    for handle in handles:
        handle.remove()
    added = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(("global", True))),
        register_optimizer_step_post_hook(lambda *_: seen.append(("global", False))),
    ]
    step()
    for handle in added:
        handle.remove()
    assert seen[2:] == [("global", True), ("global", False)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = {event.name for event in profile.events()}
    assert {"Optimizer.step#RowSGD.step", "Optimizer.zero_grad#RowSGD.zero_grad"} <= names
    assert weight[1].tolist() == [-2.0, -2.0]


def test_zero_grad_fills_with_zeros_where_asked():
    weight = torch.zeros(3, 2, requires_grad=True)
    optimizer = sx.optim.RowSGD([weight], lr=0.5)
    weight.sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0.0, 0.0]] * 3
