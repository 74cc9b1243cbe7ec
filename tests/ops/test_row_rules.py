"""The row updates: `row_apply_` on given rows, `row_update_` on the entries of a loss."""

from __future__ import annotations

import math

import pytest
import torch
from row_rules_cases import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    LR,
    OPS,
    STEP,
    acc,
    entries,
    numbers_of,
    ours,
    rule_numbers,
    summed,
)

from samplex_cuda._checks import op_error
from samplex_cuda.ops.row_reduce import row_reduce
from samplex_cuda.reference import row_rules as plain
from samplex_cuda.testing import assert_close

RULES = ["sgd", "momentum", "nesterov", "adagrad", "row_adagrad", "adam", "adamw"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def states_of(rule: str, weight: torch.Tensor) -> list[torch.Tensor]:
    """States of a run that has been going for a while."""
    g = torch.Generator().manual_seed(5)
    count = {"sgd": 0, "adam": 2, "adamw": 2}.get(rule, 1)
    shape = weight.shape[:1] if rule == "row_adagrad" else weight.shape
    made = [torch.rand(shape, generator=g, dtype=torch.float64) + 0.1 for _ in range(count)]
    return [s.to(acc(weight.dtype)).to(weight.device) for s in made]


def expected(rule, weight, states, row_ids, rows) -> None:
    if rule in ("sgd", "momentum", "nesterov"):
        buffer, momentum = (states[0], BETA1) if states else (None, 0.0)
        plain.row_sgd(
            weight, buffer, row_ids, rows, lr=LR, momentum=momentum, weight_decay=DECAY, nesterov=rule == "nesterov"
        )
    elif rule in ("adagrad", "row_adagrad"):
        plain.row_adagrad(weight, states[0], row_ids, rows, lr=LR, eps=EPS, weight_decay=DECAY)
    else:
        plain.row_adam(
            weight,
            *states,
            row_ids,
            rows,
            lr=LR,
            step=STEP,
            betas=(BETA1, BETA2),
            eps=EPS,
            weight_decay=DECAY,
            decoupled_weight_decay=rule == "adamw",
        )


@pytest.mark.parametrize("rule", RULES)
def test_numbers_of_a_rule(rule):
    """Against the formulas above, which know nothing of `samplex_cuda.optim.rules`; unused numbers may differ."""
    used = {"sgd": 4, "momentum": 4, "nesterov": 4, "adagrad": 6, "row_adagrad": 6}.get(rule, 9)
    assert list(numbers_of(rule))[:used] == rule_numbers(rule)[:used]
    if rule in ("momentum", "nesterov"):
        assert numbers_of(rule).beta1 == BETA1


def check_tables(name: str, got, want, same) -> None:
    for i, (x, y, z) in enumerate(zip(got, want, same, strict=True)):
        assert_close(f"{name} {i}", x.cpu(), y.cpu(), z.cpu(), magnitude=2.0)


def run_given(rule, dtype, shape, backend, *, count=None, dense=False, rows_dtype=None) -> None:
    g = torch.Generator().manual_seed(1)
    classes = shape[0]
    n = classes if dense else min(classes, 9)
    weight = torch.randn(shape, generator=g).to(dtype)
    rows = torch.randn(n, *shape[1:], generator=g).to(rows_dtype or dtype)
    row_ids = torch.arange(classes) if dense else torch.randperm(classes, generator=g)[:n]
    used = n if count is None else count
    results = []
    for kind in (torch.float64, acc(dtype)):
        w, states = weight.to(kind, copy=True), [s.to(kind) for s in states_of(rule, weight)]
        expected(rule, w, states, row_ids[:used], rows[:used].to(kind))
        results.append([w, *states])
    device = backend.device
    w, states = weight.to(device, copy=True), states_of(rule, weight.to(device))
    ours(
        rule,
        w,
        states,
        None if dense else row_ids.to(device),
        rows.to(device),
        None if count is None else torch.tensor([count], device=device),
    )
    truth, same = results
    check_tables(f"{rule} weight", [w], [truth[0]], [same[0].to(dtype)])
    check_tables(f"{rule} state", states, truth[1:], same[1:])
    if not dense:  # nothing else moved
        others = torch.ones(classes, dtype=torch.bool)
        others[row_ids[:used]] = False
        assert torch.equal(w.cpu()[others], weight[others])


# ------------------------------------------------------------------------------------------------ given rows
@pytest.mark.parametrize("rule", RULES)
def test_rules(backend, rule):
    run_given(rule, torch.float32, (23, 24), backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["momentum", "row_adagrad", "adam"])
def test_dtypes(backend, rule, dtype):
    run_given(rule, dtype, (14, 16), backend)
    run_given(rule, dtype, (14, 7), backend, rows_dtype=acc(dtype))


SHAPES = [(12, 1), (12, 3), (12, 33), (12, 300), (1, 5), (5, 132)]


@pytest.mark.parametrize(
    ("rule", "shape"), [("adagrad", (12,)), *((r, s) for r in ("adagrad", "row_adagrad") for s in SHAPES)], ids=str
)
def test_shapes(backend, rule, shape):
    run_given(rule, torch.float32, shape, backend)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_dense_gradient(backend, rule):
    run_given(rule, torch.float32, (11, 6), backend, dense=True)


def test_count_says_how_many_rows_there_are(backend):
    for count in (0, 4, 9):
        run_given("adagrad", torch.float32, (20, 8), backend, count=count)


def test_no_rows(backend):
    weight, total = torch.ones(3, 2, device=backend.device), torch.ones(3, 2, device=backend.device)
    none = torch.empty(0, dtype=torch.int64, device=backend.device)
    ours("adagrad", weight, [total], none, weight[:0])
    assert weight.eq(1).all()
    assert total.eq(1).all()


@pytest.mark.parametrize("rule", RULES)
def test_simd_levels(simd_level, rule):
    class Cpu:
        device = torch.device("cpu")

    for dtype in (torch.float32, torch.bfloat16):
        run_given(rule, dtype, (40, 37), Cpu)


def test_a_nan_stays_in_its_row(backend):
    weight, total = torch.zeros(4, 8, device=backend.device), torch.ones(4, 8, device=backend.device)
    rows = torch.ones(2, 8, device=backend.device)
    rows[0, 3] = math.nan
    ours("adagrad", weight, [total], torch.tensor([1, 2], device=backend.device), rows)
    assert weight.isnan().sum() == 1
    assert weight[1, 3].isnan()


# ------------------------------------------------------------------------------------------------ entries of a loss


def run_entries(rule, dtype, classes, batch, k, d, backend, *, shared=False, bias_dtype=None, whole=False):
    device = backend.device
    e = entries(classes, batch, k, d, dtype, device, shared=shared)
    if whole:  # sums of whole numbers are exact, in any order
        e = [t.mul(2).round() if t is not None and t.is_floating_point() else t for t in e]
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(classes, d, generator=g).to(dtype)
    bias = None if bias_dtype is None else torch.randn(classes, generator=g).to(bias_dtype)
    row_ids, row_grads, bias_grads = summed(e, classes)
    w, states = weight.to(device, copy=True), states_of(rule, weight.to(device))
    bias_rule = "adagrad" if rule == "row_adagrad" else rule
    b, bias_states = None, []
    if bias is not None:
        b, bias_states = bias.to(device, copy=True), states_of(bias_rule, bias.to(device))
        bias_states = [s.to(acc(dtype)) for s in bias_states]
    numbers = rule_numbers(rule)
    OPS.row_update_(
        w, *[*states, None, None][:2], b, *[*bias_states, None, None][:2], *e, None, numbers, numbers
    )  # fmt: skip
    for name, table, got, got_states, grads, kind in (
        ("weight", weight, w, states, row_grads, rule),
        ("bias", bias, b, bias_states, bias_grads, bias_rule),
    ):
        if table is None:
            continue
        results = []
        for wide in (torch.float64, acc(dtype)):
            x, s = table.to(wide, copy=True), [t.to(wide) for t in states_of(kind, table)]
            expected(kind, x, s, row_ids, grads.to(wide))
            results.append([x, *s])
        check_tables(f"{rule} {name}", [got], [results[0][0]], [results[1][0].to(table.dtype)])
        check_tables(f"{rule} {name} state", got_states, results[0][1:], results[1][1:])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["adagrad", "row_adagrad", "adam"])
def test_entries_of_few_classes(backend, rule, dtype, shared):
    """Rows of hundreds of entries, which a GPU cuts into pieces; rows of several blocks of columns."""
    run_entries(rule, dtype, 3, 90, 400 if shared else 5, 24, backend, shared=shared, bias_dtype=acc(dtype), whole=True)
    run_entries(rule, dtype, 5, 40, 90 if shared else 3, 264, backend, shared=shared, bias_dtype=acc(dtype), whole=True)


@pytest.mark.parametrize("rule", RULES)
def test_entries(backend, rule):
    run_entries(rule, torch.float32, 30, 6, 5, 12, backend, bias_dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
def test_entries_dtypes(backend, dtype, shared):
    run_entries("row_adagrad", dtype, 20, 4, 3, 9, backend, shared=shared, bias_dtype=dtype)
    run_entries("adam", dtype, 20, 4, 3, 8, backend, shared=shared, bias_dtype=acc(dtype))


@pytest.mark.parametrize(("classes", "batch", "k", "d"), [(1, 3, 2, 4), (7, 1, 1, 1), (9, 40, 6, 3), (50, 3, 4, 260)])
def test_entries_shapes(backend, classes, batch, k, d):
    run_entries("adagrad", torch.float32, classes, batch, k, d, backend)


@pytest.mark.parametrize("rule", ["adagrad", "row_adagrad"])
def test_entries_simd_levels(simd_level, rule):
    class Cpu:
        device = torch.device("cpu")

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for d in (37, 64):
            run_entries(rule, dtype, 60, 20, 7, d, Cpu, bias_dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_many_entries_share_have_the_same_bits_for_any_number_of_threads(simd_level, dtype):
    """Zipf draws: half of the entries belong to a few rows. Without weight decay, where rates come first."""
    classes, batch, k, d = 4000, 300, 60, 37
    e = entries(classes, batch, k, d, dtype, "cpu")
    e[3] = (classes ** torch.rand(batch, k)).long() - 1
    row_ids, row_grads, _ = summed(e, classes)
    assert row_ids.numel() * 8 < 7 * (batch * k + batch)
    weight = torch.randn(classes, d).to(dtype)
    numbers = rule_numbers("row_adagrad", 0.0)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([weight.clone(), *states_of("row_adagrad", weight)])
            OPS.row_update_(*found[-1], None, None, None, None, *e, None, numbers, numbers)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))
    results = []
    for wide in (torch.float64, torch.float32):
        w, (total,) = weight.to(wide, copy=True), [s.to(wide) for s in states_of("row_adagrad", weight)]
        plain.row_adagrad(w, total, row_ids, row_grads.to(wide), lr=LR, eps=EPS, weight_decay=0.0)
        results.append([w, total])
    check_tables("weight", found[0][:1], results[0][:1], [results[1][0].to(dtype)])
    check_tables("sum", found[0][1:], results[0][1:], results[1][1:])


def test_no_entries(backend):
    e = entries(5, 2, 3, 4, torch.float32, backend.device)
    empty = [None if t is None else t[:0] for t in e]
    weight, total = torch.ones(5, 4, device=backend.device), torch.ones(5, 4, device=backend.device)
    OPS.row_update_(weight, total, None, None, None, None, *empty, None, *[rule_numbers("adagrad")] * 2)
    assert weight.eq(1).all()


def test_summing_on_the_way_gives_the_bits_of_reducing_first():
    e = entries(3000, 300, 40, 24, torch.float32, "cpu")
    row_ids, rows, _, count = row_reduce(e[3], e[4], e[2], 3000)
    first = [torch.ones(3000, 24), torch.zeros(3000, 24)]
    ours("adagrad", first[0], first[1:], row_ids, rows, count)
    none = [e[0][:0], e[1][:0], e[2][:0]]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            then = [torch.ones(3000, 24), torch.zeros(3000, 24)]
            OPS.row_update_(*then, None, None, None, None, *none, *e[3:], None, *[rule_numbers("adagrad")] * 2)
            assert all(torch.equal(x, y) for x, y in zip(first, then, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [(rule, torch.float32) for rule in RULES]
    + [(rule, dtype) for rule in ("adagrad", "row_adagrad") for dtype in (torch.bfloat16, torch.float16)],
)
def test_a_table_beyond_the_cache_gets_the_bits_of_a_small_one(simd_level, rule, dtype):
    """Rows of a weight of 32 MiB and more are written past the cache."""
    classes, d = 40_000 * 4 // dtype.itemsize, 256
    e = entries(classes, 50, 30, d, dtype, "cpu")
    e[3][1] = e[3][0]  # some rows with two entries
    touched, at = torch.unique(torch.cat([e[0].flatten(), e[3].flatten()]), return_inverse=True)
    at[: e[0].numel()][e[0].flatten() < 0] = -100
    of_small = [at[: e[0].numel()].view(-1, 1), e[1], e[2], at[e[0].numel() :].view(e[3].shape), *e[4:]]
    before = torch.randn(classes, d).to(dtype)
    big, small = before.clone(), before[touched.clamp_min(0)]
    of_big = states_of(rule, big)
    states = [of_big, [s[touched.clamp_min(0)] for s in of_big]]
    for table, kept, found in ((big, states[0], e), (small, states[1], of_small)):
        OPS.row_update_(table, *[*kept, None, None][:2], None, None, None, *found, None, *[rule_numbers(rule)] * 2)
    real = touched >= 0
    assert big.nbytes >= 32 << 20 > small.nbytes
    assert torch.equal(big[touched[real]], small[real])
    assert not torch.equal(big[touched[real]], before[touched[real]])
    rest = torch.ones(classes, dtype=torch.bool)
    rest[touched[real]] = False
    assert torch.equal(big[rest], before[rest])
    for state, of_one in zip(*states, strict=True):
        assert torch.equal(state[touched[real]], of_one[real])


# ------------------------------------------------------------------------------------------------ torch's own checks
def test_opcheck(backend):
    device = backend.device
    weight, total = torch.randn(6, 4, device=device), torch.rand(6, 4, device=device)
    ids, rows = torch.tensor([4, 1], device=device), torch.randn(2, 4, device=device)
    key = torch.tensor([1, 2], device=device)
    check = torch.library.opcheck
    check(OPS.row_apply_.default, (weight, total, None, ids, rows, None, key, numbers_of("nesterov")))
    check(OPS.row_apply_.default, (weight, total, None, None, weight.clone(), None, None, numbers_of("adagrad")))
    check(OPS.row_apply_.default, (weight, total, total.clone(), ids, rows, None, None, numbers_of("adam")))
    e = entries(6, 3, 2, 4, torch.float32, device)
    numbers = rule_numbers("adagrad")
    check(OPS.row_update_.default, (weight, total, None, None, None, None, *e, None, numbers, numbers))


@pytest.mark.parametrize("shared", [False, True])
def test_opcheck_loss_entries(backend, shared):
    from samplex_cuda.ops.sampled_softmax import sampled_softmax

    device = backend.device
    h, weight = torch.randn(3, 4, device=device), torch.randn(9, 4, device=device)
    ids = torch.tensor([1, 5, 7], device=device) if shared else torch.tensor([[1, 5], [2, 6], [7, 8]], device=device)
    log_q, target = torch.full(ids.shape, -2.0, device=device), torch.tensor([0, 3, 4], device=device)
    _, _, saved = sampled_softmax(
        h, weight, target, ids, log_q, None, None, None, None, 1.0, 0.0, -100, 1, False, True, False, True
    )  # fmt: skip
    grad = torch.ones((), device=device)
    for more in ({}, {"num_classes": 9}):
        torch.library.opcheck(OPS.loss_entries.default, (grad, None, h, target, ids, saved, 1, False, True), more)
    # With a ratio of each row behind it, which has to be said.
    longer = torch.cat([saved, saved.new_zeros(3)])
    with pytest.raises(RuntimeError, match=r"ValueError: loss_entries: saved must be what the forward kept"):
        OPS.loss_entries(grad, None, h, target, ids, longer, 1, False, True)
    plain = OPS.loss_entries(grad, None, h, target, ids, saved, 1, False, True)
    got = OPS.loss_entries(grad, None, h, target, ids, longer, 1, False, True, True)
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


# ------------------------------------------------------------------------------------------------ both in one op
@pytest.mark.parametrize("reduction", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("batch", "m", "shared"), [(3, 2, False), (3, 2, True), (40, 21, True), (0, 4, True), (3, 0, True)]
)
def test_loss_update_is_the_entries_and_their_update(backend, batch, m, shared, with_bias, reduction):
    from samplex_cuda.ops.sampled_softmax import sampled_softmax

    device, g = backend.device, torch.Generator().manual_seed(2)
    h, weight = torch.randn(batch, 6, generator=g).to(device), torch.randn(9, 6, generator=g).to(device)
    ids = torch.randint(9, (m,) if shared else (batch, m), generator=g).to(device)
    target = torch.randint(9, (batch,), generator=g).to(device)
    target[:1] = -100  # its coefficients are 0: left out
    log_q = torch.full(ids.shape, -2.0, device=device)
    loss, _, saved = sampled_softmax(
        h, weight, target, ids, log_q, None, None, None, None, 1.0, 0.0, -100, reduction, False, True, False, True
    )  # fmt: skip
    grad = torch.full_like(loss, 0.5)
    _, coef_a, coef_b, rows_b, bias_b, _ = OPS.loss_entries(
        grad, None, h, target, ids, saved, reduction, False, with_bias
    )
    if shared:
        e = (target, coef_a, h, ids[: rows_b.shape[0]], coef_b, rows_b, bias_b if with_bias else None)
    else:
        e = (target, coef_a, h, ids, coef_b, h, None)
    rules = [rule_numbers("adagrad")] * 2
    results = []
    for at_once in (False, True):
        bias = [torch.ones(9, device=device), torch.zeros(9, device=device)] if with_bias else [None, None]
        tables = [weight.clone(), torch.ones(9, 6, device=device), None, *bias, None]
        if at_once:
            table, sums, _, bias_table, bias_sums, _ = tables
            given = (grad, h, target, ids, saved, rules[0], sums, None, bias_table, rules[1], bias_sums, None)
            OPS.loss_update_(table, *given, reduction)
        else:
            OPS.row_update_(*tables, *e, None, *rules)
        results.append([t for t in tables if t is not None])
    assert torch.equal(results[0][0], weight) == (batch == 0 or m == 0)  # nothing to learn from
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    call = (weight, grad, h, target, ids, saved, rules[0], torch.ones_like(weight))
    which = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPS.loss_update_.default, call, {"reduction": reduction}, test_utils=which)
    with pytest.raises(RuntimeError, match=r"loss_update_: weight must be \[C, 6\] to fit hidden, got \[9, 5"):
        OPS.loss_update_(weight[:, :5].contiguous(), *call[1:], reduction=reduction)


# ------------------------------------------------------------------------------------------------ keys of a backward
@pytest.mark.parametrize("reduction", [0, 1])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("batch", "m"), [(3, 2), (40, 21)])  # the second: rows in pieces, which count arrivals
def test_keys_made_by_a_backward_are_those_of_the_update(backend, batch, m, shared, reduction):
    from samplex_cuda.ops.sampled_softmax import sampled_softmax

    device, g = backend.device, torch.Generator().manual_seed(2)
    h, weight = torch.randn(batch, 6, generator=g).to(device), torch.randn(9, 6, generator=g).to(device)
    ids = torch.randint(9, (m,) if shared else (batch, m), generator=g).to(device)
    target = torch.randint(9, (batch,), generator=g).to(device)
    target[0] = -100  # its coefficients are 0: left out
    log_q = torch.full(ids.shape, -2.0, device=device)
    loss, _, saved = sampled_softmax(
        h, weight, target, ids, log_q, None, None, None, None, 1.0, 0.0, -100, reduction, False, True, False, True
    )  # fmt: skip
    grad = torch.ones_like(loss)
    call = (grad, None, h, target, ids, saved, reduction, False, True)
    *without, none = OPS.loss_entries(*call)
    *found, keys = OPS.loss_entries(*call, num_classes=9)
    assert all(torch.equal(a, b) for a, b in zip(found, without, strict=True))
    assert none.numel() == 0
    assert (keys.numel() == 0) == (backend.name == "cpu")
    _, coef_a, coef_b, rows_b, bias_b = found
    e = (target, coef_a, h, ids, coef_b, *((rows_b, bias_b) if shared else (h, None)))
    results = []
    for given in (None, keys if keys.numel() > 0 else None):
        tables = [weight.clone(), torch.ones(9, 6, device=device), torch.ones(9, device=device)]
        total = torch.zeros(9, device=device)
        OPS.row_update_(
            tables[0], tables[1], None, tables[2], total, None, *e, None, *[rule_numbers("adagrad")] * 2, keys=given
        )
        results.append([*tables, total])
    assert not torch.equal(results[0][0], weight)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    if keys.numel() > 0:
        for wrong in (keys[1:].clone(), keys.long()):
            with pytest.raises(RuntimeError, match=r"row_update_: keys must be \[n\], as loss_entries made them"):
                OPS.row_update_(weight, None, None, None, None, None, *e, None, *[rule_numbers("sgd")] * 2, keys=wrong)


# ------------------------------------------------------------------------------------------------ errors
def adagrad_args():
    rule = numbers_of("adagrad")
    return [torch.zeros(6, 4), torch.zeros(6, 4), None, torch.tensor([1, 2]), torch.zeros(2, 4), None, None, rule]


@pytest.mark.parametrize(
    ("position", "value", "text"),
    [
        (0, torch.zeros(6, 4, 1), "weight must be [C] or [C, d], got [6, 4, 1] float32 on cpu"),
        (0, torch.zeros(4, 6).T, "weight must be contiguous, got [6, 4] float32 on cpu (not contiguous)"),
        (0, torch.zeros(6, 4).long(), "weight must be float32, float64, float16 or bfloat16, got [6, 4] int64 on cpu"),
        (1, torch.zeros(5, 4), "state0 must be [C, d] = [6, 4] float32 contiguous on cpu, got [5, 4] float32 on cpu"),
        (1, torch.zeros(6), "state0 must be [C, d] = [6, 4] float32 contiguous on cpu, got [6] float32 on cpu"),
        (1, None, "state0 and state1 must be the 1 states of the rule, got 0"),
        (2, torch.zeros(6, 4), "state0 and state1 must be the 1 states of the rule, got 2"),
        (1, torch.zeros(6, 4).double(), "state0 must be [C, d] = [6, 4] float32 contiguous on cpu, got [6, 4] float64"),
        (3, torch.tensor([1, 6]), "row_ids must be in [0, C) with C = 6, got 6"),
        (3, torch.tensor([-1, 3]), "row_ids must be in [0, C) with C = 6, got -1"),
        (3, torch.tensor([[1, 2]]), "row_ids must be [n] = [*] int64 contiguous on cpu, got [1, 2] int64 on cpu"),
        (4, torch.zeros(3, 4), "rows must be [n, d] = [2, 4] float32 contiguous on cpu, got [3, 4] float32 on cpu"),
        (4, torch.zeros(2, 4).half(), "rows must be float32 as the weight, or float32, got [2, 4] float16 on cpu"),
        (5, torch.tensor(2), "count must be [1] = [1] int64 contiguous on cpu, got [] int64 on cpu"),
        (6, torch.tensor([1]), "key must be [2] = [2] int64 contiguous on cpu, got [1] int64 on cpu"),
    ],
)  # fmt: skip
def test_bad_input(position, value, text):
    args = adagrad_args()
    OPS.row_apply_(*args)
    args[position] = value
    with pytest.raises(RuntimeError) as caught:
        OPS.row_apply_(*args)
    assert str(op_error(caught.value)).startswith(f"row_apply_: {text}")


def test_bad_input_of_the_others():
    e = entries(6, 3, 2, 4, torch.float32, "cpu")
    numbers = rule_numbers("adagrad")
    fail = [
        ({"weight": torch.zeros(6)}, "weight must be [C, d], got [6] float32 on cpu"),
        ({"state": None}, "weight_state0 and weight_state1 must be the 1 states of the rule, got 0"),
        ({"bias": torch.zeros(5)}, "bias must be [C] = [6] float32 contiguous on cpu, got [5] float32 on cpu"),
        ({"rule": numbers[:4]}, "weight_rule must have 9 numbers, got 4"),
        ({"rule": [7.0, *numbers[1:]]}, "weight_rule[0] must be a kind of 0 to 4, got 7"),
        ({"e": [e[0][:2], *e[1:]]}, "rows_a must be [S, d] = [2, 4] float32 contiguous on cpu, got [3, 4] float32"),
    ]
    for change, text in fail:
        c = {"weight": torch.zeros(6, 4), "state": torch.zeros(6, 4), "bias": None, "rule": numbers, "e": e} | change
        with pytest.raises(RuntimeError) as caught:
            OPS.row_update_(c["weight"], c["state"], None, c["bias"], None, None, *c["e"], None, c["rule"], numbers)
        assert str(op_error(caught.value)).startswith(f"row_update_: {text}")
