"""Draws and an entry loss in one op: the same bits as the two ops, and what the head makes of it."""

from __future__ import annotations

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_cuda._checks import op_error
from samplex_cuda.ops.loss_types import ENTRY_KINDS as KINDS

OPS = torch.ops.samplex
CLASSES = 50
LOSSES = ["negative_sampling", "nce", "one_vs_each"]
EXAMPLES = 20


def sampler_of(name):
    counts = torch.arange(CLASSES, 0, -1.0)
    made = {"uniform": sx.samplers.Uniform, "log_uniform": sx.samplers.LogUniform}
    return made[name](CLASSES) if name in made else sx.samplers.Unigram(counts)


def arguments(loss, name="log_uniform", *, dtype=torch.float32, bias=True, reduction=1, batch=6, m=9, dim=12,
              device="cpu", need_grad=True, shared=True, reg=0.0):  # fmt: skip
    """Arguments of `entry_loss_static` by name; row 1 is ignored."""
    gen = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, dim, generator=gen).to(device, dtype) for n in (batch, CLASSES))
    target = torch.randint(CLASSES, (batch,), generator=gen).to(device)
    target[1:2] = -100
    law = sampler_of(name).to(device).law()
    return {
        "hidden": hidden, "weight": weight, "target": target, "key": torch.tensor([5, 7], device=device),
        "law": law.number, "num_samples": m, "shared": shared, "table": law.table, "prefix": law.prefix,
        "bias": torch.randn(CLASSES, generator=gen).to(device, dtype) if bias else None,
        "class_weight": (torch.rand(CLASSES, generator=gen) + 0.5).to(device, dtype), "kind": KINDS[loss],
        "scale": 1.5, "reg": reg, "ignore_index": -100, "reduction": reduction, "need_grad": need_grad,
    }  # fmt: skip


def with_examples(**options):
    """Arguments of `augment_reduce_static_`: rows 0 and 2 are of one example."""
    a = arguments("augment_reduce", **options)
    device, wide = a["weight"].device, torch.float64 if a["weight"].dtype is torch.float64 else torch.float32
    index = torch.arange(a["hidden"].shape[0]) % EXAMPLES
    index[2:3] = 0
    examples = {"log_eta": torch.linspace(2.0, 9.0, EXAMPLES).to(device, wide), "index": index.to(device), "rate": 0.3}
    after = {name: a.pop(name) for name in ("scale", "ignore_index", "reduction", "need_grad")}
    del a["kind"], a["reg"]
    return {**a, **examples, **after}


def in_two_calls(a, ids, log_q, target_log_q=None, log_eta=None):
    """The loss of given draws."""
    if a["weight"].dtype is torch.float64:
        log_q, target_log_q = (None if t is None else t.double() for t in (log_q, target_log_q))
    return OPS.entry_loss(
        a["hidden"], a["weight"], a["target"], ids, log_q, target_log_q, log_eta, a["bias"], a["class_weight"], None,
        None, a.get("kind", KINDS["augment_reduce"]), a["scale"], a.get("reg", 0.0), a["ignore_index"], a["reduction"],
        a["need_grad"], True,
    )  # fmt: skip


def drawn_apart(name, a):
    """The draw as the sampler makes it, and log q of the targets where the loss reads it."""
    sampler, shared = sampler_of(name).to(a["weight"].device), a["shared"]
    relative = a.get("kind", KINDS["augment_reduce"]) >= KINDS["one_vs_each"]
    exclude = a["target"].clamp_min(-1) if relative and not shared else None
    draw = sampler.sample(a["hidden"], a["num_samples"], shared=shared, key=a["key"], exclude=exclude)
    if relative:
        return draw, None
    return draw, sampler.log_prob(a["hidden"], a["target"].clamp_min(0))


def check_bits(name, a):
    loss, ids, saved = OPS.entry_loss_static(*a.values())
    draw, target_log_q = drawn_apart(name, a)
    assert torch.equal(ids, draw.ids)
    wanted = in_two_calls(a, draw.ids, draw.log_q, target_log_q)
    assert torch.equal(loss, wanted[0])
    assert torch.equal(saved.nan_to_num(0.0), wanted[1].nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["uniform", "log_uniform", "unigram"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shared", [True, False])
def test_it_gives_the_bits_of_the_draw_and_the_loss(backend, shared, loss, name, dtype):
    for reduction in (0, 1, 2):
        for reg in (0.0, 0.1) if loss == "negative_sampling" else (0.0,):
            options = {"reduction": reduction, "reg": reg, "shared": shared, "device": backend.device}
            check_bits(name, arguments(loss, name, dtype=dtype, **options))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dim", "m", "shift"), [(5, 1, 0), (6, 17, 0), (8, 17, 1), (0, 4, 0), (8, 0, 0)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shared", [True, False])
def test_draws_and_rows_of_any_width(backend, shared, loss, dim, m, shift, bias):
    a = arguments(loss, dim=dim, m=m, bias=bias, shared=shared, device=backend.device)
    memory = torch.empty(CLASSES * dim + shift, device=backend.device)
    a["weight"] = memory[shift:].view(CLASSES, dim).copy_(a["weight"])
    check_bits("log_uniform", a)


@pytest.mark.parametrize("loss", ["nce", "negative_sampling"])
@pytest.mark.parametrize("batch", [255, 257, 600])
def test_every_target_is_scored(backend, loss, batch):
    """More rows than a block of the kernel that scores them has threads."""
    for shared in (True, False):
        options = {"batch": batch, "m": 3, "dim": 4, "shared": shared, "device": backend.device}
        check_bits("unigram", arguments(loss, "unigram", reduction=0, reg=0.2 * (loss != "nce"), **options))


@pytest.mark.parametrize("batch", [1, 31, 33, 2048, 2049])
@pytest.mark.parametrize("ignored", [False, True])
def test_the_mean_over_the_batch(backend, batch, ignored):
    """On a GPU the last block of the loss makes it up to 2048 rows, a separate kernel for more."""
    found = {}
    for reduction in (0, 1, 2):
        a = arguments("one_vs_each", reduction=reduction, batch=batch, m=3, dim=4, device=backend.device)
        a["class_weight"] = None
        if ignored:
            a["target"].fill_(-100)
        found[reduction] = OPS.entry_loss_static(*a.values())[0].cpu().double()
    counted = 0 if ignored else batch - (batch > 1)
    torch.testing.assert_close(found[2], found[0].sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], found[0].sum() / max(counted, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_opcheck(backend, loss):
    for reduction in (0, 1):
        a = arguments(loss, "unigram", reduction=reduction, device=backend.device)
        torch.library.opcheck(
            OPS.entry_loss_static.default, tuple(a.values()), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("loss", LOSSES)
def test_the_op_alone_has_the_gradients_of_the_other(loss):
    a, grads = arguments(loss), []
    for call in ("static", "given"):
        leaves = [a[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
        b = {**a, **dict(zip(("hidden", "weight", "bias"), leaves, strict=True))}
        value, ids, _ = OPS.entry_loss_static(*b.values())
        if call == "given":
            target_log_q = None if loss == "one_vs_each" else drawn_apart("log_uniform", a)[1]
            value = in_two_calls(b, ids, sampler_of("log_uniform").log_prob(None, ids), target_log_q)[0]
        grads.append([g.to_dense() for g in torch.autograd.grad(value, leaves)])
    for ours, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_an_empty_batch(backend):
    value, ids, _ = OPS.entry_loss_static(*arguments("one_vs_each", batch=0, device=backend.device).values())
    assert float(value) == 0.0
    assert ids.shape == (9,)


# ------------------------------------------------------------------------------------------------ numbers per example
def check_examples(a, name="log_uniform"):
    """The op beside draw, loss and `update_state`; returns log eta before and after."""
    before = a["log_eta"].clone()
    loss, ids, saved = OPS.augment_reduce_static_(*a.values())
    draw, _ = drawn_apart(name, a)
    assert torch.equal(ids, draw.ids)
    used, batch = before[a["index"]], a["hidden"].shape[0]
    wanted = in_two_calls(a, draw.ids, draw.log_q, None, used)
    torch.testing.assert_close(loss, wanted[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(saved[:-batch].nan_to_num(0.0), wanted[1][:-batch].nan_to_num(0.0))
    moved = before.clone()
    rule = sx.losses.AugmentReduce(num_examples=EXAMPLES, rate=a["rate"])
    rule.update_state(moved, a["index"], used, wanted[1][-batch:])
    torch.testing.assert_close(a["log_eta"], moved, equal_nan=True)
    return before, a["log_eta"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shared", [True, False])
def test_numbers_of_examples_are_read_and_moved(backend, shared, dtype):
    for reduction in (0, 1, 2):
        options = {"dtype": dtype, "reduction": reduction, "shared": shared, "device": backend.device}
        before, after = check_examples(with_examples(**options))
        assert torch.equal(after[6:], before[6:])  # of no row
        assert not torch.equal(after[:1], before[:1])


@pytest.mark.parametrize("batch", [1, 257, 2048, 2049, 9000])
@pytest.mark.parametrize("shared", [True, False])
def test_examples_of_any_batch(backend, shared, batch):
    """On a GPU the last block of the loss moves them up to 2048 rows, a separate kernel for more; many are repeated."""
    a = with_examples(batch=batch, m=2, dim=4, shared=shared, device=backend.device)
    a["rate"] = 1.0  # then log eta is that of this batch alone
    check_examples(a)


def test_what_a_step_makes_of_odd_numbers(backend):
    a = with_examples(device=backend.device, reduction=0)
    a["hidden"][3] = torch.nan  # no news of its example
    a["log_eta"][4] = torch.nan  # stays
    a["hidden"][5] *= 1e4  # a sum that overflows counts as the largest that does not
    before, after = check_examples(a)
    assert after[3] == before[3]
    assert after[4].isnan()
    assert after[5] <= before[5] + 88


@pytest.fixture
def ids_of_a_device(backend):
    """Ids are left to the kernels, as those of a device are."""
    if backend.name == "cpu":
        pytest.skip("on the CPU the host refuses a bad index")
    if backend.emulated:
        _native.set_device_ids(True)
    yield
    if backend.emulated:
        _native.set_device_ids(False)


@pytest.mark.usefixtures("ids_of_a_device")
def test_an_example_out_of_range_is_left_alone(backend):
    """The loss of its row is nan, and no memory outside of the numbers is touched."""
    for shared in (True, False):
        a = with_examples(device=backend.device, reduction=0, shared=shared)
        good = {**a, "log_eta": a["log_eta"].clone()}
        wanted = OPS.augment_reduce_static_(*good.values())[0]
        a["index"][4], a["index"][5] = EXAMPLES, -1
        loss = OPS.augment_reduce_static_(*a.values())[0]
        assert loss[4:].isnan().all()
        assert torch.equal(loss[:4], wanted[:4])
        assert torch.equal(a["log_eta"][:4], good["log_eta"][:4])
        assert torch.equal(a["log_eta"][4:], torch.linspace(2.0, 9.0, EXAMPLES).to(backend.device)[4:])


def test_opcheck_with_examples(backend):
    for shared in (True, False):
        a = with_examples(device=backend.device, shared=shared)
        torch.library.opcheck(
            OPS.augment_reduce_static_.default, tuple(a.values()), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"index": torch.tensor([0, 1, 2, 3, 4, EXAMPLES])}, IndexError, "index must be in [0, 20), got 20"),
        ({"index": torch.zeros(5, dtype=torch.int64)}, ValueError, "index must be [B]"),
        ({"log_eta": torch.zeros(EXAMPLES, dtype=torch.float64)}, TypeError, "log_eta must be [N]"),
        ({"rate": 0.0}, ValueError, "rate must be in (0, 1], got 0"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)  # fmt: skip
def test_bad_examples_are_named(change, kind, text):
    a = {**with_examples(), **change}
    with pytest.raises(RuntimeError) as caught:
        OPS.augment_reduce_static_(*a.values())
    error = op_error(caught.value)
    assert type(error) is kind
    assert text in str(error)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"target": torch.tensor([0, 1, 2, 3, 4, CLASSES])}, IndexError, "or ignore_index, got 50"),
        ({"target": torch.zeros(5, dtype=torch.int64)}, ValueError, "target must be [B]"),
        ({"law": 3}, ValueError, "law must be in [0, 2], got 3"),
        ({"law": 2}, ValueError, "table and prefix must be given"),
        ({"num_samples": -1}, ValueError, "num_samples must be in [0, 2^24], got -1"),
        ({"key": torch.zeros(3, dtype=torch.int64)}, ValueError, "key must be [2]"),
        ({"hidden": torch.zeros(6)}, ValueError, "hidden must be [B, d]"),
        ({"weight": torch.zeros(6)}, ValueError, "weight must be [C, d]"),
        ({"weight": torch.zeros(0, 8)}, ValueError, "weight must have at least one class, got [0, 8]"),
        ({"kind": 3}, ValueError, "kind must be 0 (negative_sampling), 1 (nce) or 2 (one_vs_each), got 3"),
        ({"reg": 0.1}, ValueError, "reg must be 0, got 0.1"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)  # fmt: skip
def test_bad_arguments_are_named(change, kind, text):
    a = {**arguments("one_vs_each"), **change}
    with pytest.raises(RuntimeError) as caught:
        OPS.entry_loss_static(*a.values())
    error = op_error(caught.value)
    assert type(error) is kind
    assert text in str(error)


class Spy(sx.samplers.Uniform):
    """A static sampler that overrides `sample`, which a head then calls."""

    def sample(self, *args, **options):
        return super().sample(*args, **options)


@pytest.mark.parametrize("loss", [*LOSSES, sx.losses.NegativeSampling(reg=0.1)], ids=str)
@pytest.mark.parametrize("shared", [True, False])
def test_a_head_draws_the_same_either_way(backend, shared, loss):
    found = []
    for kind in (sx.samplers.Uniform, Spy):
        torch.manual_seed(0)
        head = sx.SampledClassifier(12, CLASSES, kind(CLASSES), num_samples=7, shared=shared, loss=loss)
        head.to(backend.device).fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.5))
        assert head.spec().draws_static == (kind is not Spy)
        h = torch.randn(4, 12).to(backend.device).requires_grad_()
        value = head(h, torch.tensor([0, 3, -100, 3], device=backend.device))
        value.backward()
        found.append((value.detach(), h.grad, head.weight.detach().clone(), head.bias.detach().clone()))
    for ours, spied in zip(*found, strict=True):
        assert torch.equal(ours, spied)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("form", ["mean", "rows", "weighted"])
def test_a_head_moves_the_numbers_of_examples_either_way(backend, monkeypatch, form, shared):
    """In the op where a launch costs more than a step of `update_state`, as on a GPU; else by torch."""
    found = []
    for in_op in (True, False):
        monkeypatch.setattr(sx.losses.AugmentReduce, "moves_state", lambda self, like, one=in_op: one)
        torch.manual_seed(0)
        loss = sx.losses.AugmentReduce(num_examples=EXAMPLES)
        head = sx.SampledClassifier(12, CLASSES, sx.samplers.Uniform(CLASSES), 7, shared=shared, loss=loss,
                                    reduction="none" if form == "rows" else "mean").to(backend.device)  # fmt: skip
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.5))
        h = torch.randn(4, 12).to(backend.device).requires_grad_()
        y, index = torch.tensor([0, 3, -100, 3]).to(backend.device), torch.tensor([5, 1, 2, 1]).to(backend.device)
        weight = torch.rand(4).to(backend.device) if form == "weighted" else None
        value = head(h, y, index=index, sample_weight=weight)
        value.sum().backward()
        found.append((value.detach(), h.grad, head.weight.detach().clone(), head.log_eta.clone()))
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted)
    assert not torch.equal(found[0][-1], torch.full_like(found[0][-1], float(found[0][-1][0])))


def test_what_an_op_draws_by_itself():
    def static(loss, **options):
        head = sx.SampledClassifier(4, CLASSES, sx.samplers.Uniform(CLASSES), 7, loss=loss, **options)
        return head.spec().draws_static, head.spec().plain

    for shared in (True, False):
        for loss in (*LOSSES, sx.losses.NegativeSampling(reg=0.1)):
            assert static(loss, shared=shared) == (True, True)
        assert static(sx.losses.AugmentReduce(num_examples=3), shared=shared) == (True, False)
    assert static("nce", ignore_index=3) == (False, False)
