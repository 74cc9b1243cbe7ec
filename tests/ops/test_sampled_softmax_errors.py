"""Bad input of the fused sampled softmax: each names op, argument, wanted and got, before anything is allocated."""

# ruff: noqa: E501  (tables of messages)
from __future__ import annotations

import re

import pytest
import torch

from samplex_cuda import functional
from samplex_cuda._checks import op_error
from samplex_cuda.reference.sampled_softmax import sampled_softmax

B, M, D, C, P = 3, 4, 8, 20, 2


def good() -> dict[str, object]:
    """Arguments of a call that works."""
    g = torch.Generator().manual_seed(0)
    return {
        "h": torch.randn(B, D, generator=g),
        "weight": torch.randn(C, D, generator=g),
        "target": torch.randint(0, C, (B,), generator=g),
        "ids": torch.randint(0, C, (B, M), generator=g),
        "log_q": torch.full((B, M), -1.0),
        "bias": torch.zeros(C),
        "class_weight": torch.ones(C),
        "positives": (torch.tensor([0, 1, 1, 2]), torch.tensor([3, 4])),
    }


def filled(value: int, shape=(B,)) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int64)


def changed(position: tuple[int, ...], value: int, shape: tuple[int, ...]) -> torch.Tensor:
    t = filled(1, shape)
    t[position] = value
    return t


def test_the_good_call_works():
    args = good()
    rows, _, _ = sampled_softmax(**args)
    torch.testing.assert_close(functional.sampled_softmax(**args), rows.mean())


META = torch.device("meta")
BAD = {
    # rank and shape
    "h rank": ("h", torch.tensor(1.0), ValueError, "h must be [*, 8] to fit weight [20, 8], got [] float32 on cpu"),
    "h dim": ("h", torch.zeros(B, 7), ValueError, "h must be [*, 8] to fit weight [20, 8], got [3, 7] float32 on cpu"),
    "weight rank": ("weight", torch.zeros(C), ValueError, "weight must be [C, d] float32, float64, float16 or bfloat16, got [20]"),
    "target rows": ("target", filled(1, (2,)), ValueError, "to fit h [3, 8], got [2] int64"),
    "target rank": ("target", filled(1, (B, 1, 1)), ValueError, "target must be [3]"),
    "ids rows": ("ids", filled(1, (2, M)), ValueError, "log_q must have the shape of ids [2, 4], got [3, 4] float32"),
    "ids rank": ("ids", torch.tensor(1), ValueError, "log_q must have the shape of ids []"),
    "log_q shape": ("log_q", torch.zeros(B, M + 1), ValueError, "log_q must have the shape of ids [3, 4], got [3, 5] float32"),
    "bias shape": ("bias", torch.zeros(C + 1), ValueError, "on cpu, got [21] float32"),
    "class_weight shape": ("class_weight", torch.ones(C, 1), ValueError, "class_weight must be [20]"),
    # dtype
    "h dtype": ("h", torch.zeros(B, D, dtype=torch.float64), TypeError, "h must be torch.float32 like weight (or run under autocast), got [3, 8] float64"),
    "weight dtype": ("weight", torch.zeros(C, D, dtype=torch.int32), ValueError, "weight must be [C, d] float32, float64, float16 or bfloat16, got [20, 8] int32"),
    "target dtype": ("target", torch.zeros(B, dtype=torch.int32), TypeError, "target must be int64, got [3] int32"),
    "target float": ("target", torch.zeros(B), TypeError, "target must be int64, got [3] float32"),
    "ids dtype": ("ids", torch.zeros(B, M, dtype=torch.int32), TypeError, "ids must be int64, got [3, 4] int32"),
    "log_q dtype": ("log_q", filled(0, (B, M)), TypeError, "log_q must be floating point, got [3, 4] int64"),
    "bias dtype": ("bias", torch.zeros(C, dtype=torch.float64), ValueError, "bias must be [20]"),
    # not a tensor
    "h list": ("h", [1.0], TypeError, "h must be a tensor [*, d], got list"),
    "ids None": ("ids", None, TypeError, "ids must be a tensor [*, m] or [m] int64, got NoneType"),
    "bias list": ("bias", [0.0] * C, TypeError, "bias must be a tensor [C], got list"),
    # device
    "h device": ("h", torch.zeros(B, D, device=META), ValueError, "h must be on cpu like weight, got [3, 8] float32 on meta"),
    "target device": ("target", filled(1).to(META), ValueError, "target must be on cpu like weight, got [3] int64 on meta"),
    "ids device": ("ids", filled(1, (B, M)).to(META), ValueError, "ids must be on cpu like weight, got [3, 4] int64 on meta"),
    "log_q device": ("log_q", torch.zeros(B, M, device=META), ValueError, "log_q must be on cpu like weight, got [3, 4] float32 on meta"),
    "bias device": ("bias", torch.zeros(C, device=META), ValueError, "on cpu, got [20] float32 on meta"),
    # range
    "ids high": ("ids", changed((1, 2), C, (B, M)), IndexError, "ids must be in [0, 20), got 20 at flat position 6"),
    "ids low": ("ids", changed((0, 1), -1, (B, M)), IndexError, "ids must be in [0, 20), got -1 at flat position 1"),
    "ids -100": ("ids", changed((0, 0), -100, (B, M)), IndexError, "ids must be in [0, 20), got -100 at flat position 0"),
    "ids huge": ("ids", changed((2, 3), 2**62, (B, M)), IndexError, f"ids must be in [0, 20), got {2**62} at flat position 11"),
    "target high": ("target", changed((2,), C, (B,)), IndexError, "target must be in [0, 20) or ignore_index, got 20 at flat position 2"),
    "target low": ("target", changed((0,), -1, (B,)), IndexError, "target must be in [0, 20) or ignore_index, got -1 at flat position 0"),
    "targets": ("target", changed((1, 1), -7, (B, P)), IndexError, "target must be in [0, 20) or ignore_index, got -7 at flat position 3"),
    # options
    "smoothing high": ("label_smoothing", 1.5, ValueError, "label_smoothing must be in [0, 1], got 1.5"),
    "smoothing low": ("label_smoothing", -0.1, ValueError, "label_smoothing must be in [0, 1], got -0.1"),
    "smoothing nan": ("label_smoothing", float("nan"), ValueError, "label_smoothing must be in [0, 1], got nan"),
    "reduction": ("reduction", "average", ValueError, "reduction must be one of none, mean, sum, got 'average'"),
    # positives
    "positives type": ("positives", torch.zeros(3), TypeError, "positives must be a tuple (offsets [B + 1], ids [n]), got [3] float32"),
    "positives length": ("positives", (filled(0, (B,)), filled(0, (0,))), ValueError, "positives must be (offsets [4], ids [n]), got offsets [3] int64"),
    "positives dtype": ("positives", (torch.zeros(B + 1), filled(0, (0,))), TypeError, "positives offsets must be int64, got [4] float32"),
    "positives device": ("positives", (filled(0, (B + 1,)), filled(0, (0,)).to(META)), ValueError, "positives ids must be on cpu"),
    "positives start": ("positives", (torch.tensor([1, 1, 1, 2]), filled(1, (2,))), ValueError, "positives offsets must ascend from 0 to 2"),
    "positives end": ("positives", (torch.tensor([0, 1, 1, 3]), filled(1, (2,))), ValueError, "positives offsets must ascend from 0 to 2"),
    "positives order": ("positives", (torch.tensor([0, 2, 1, 2]), filled(1, (2,))), ValueError, "positives offsets must ascend from 0 to 2"),
    "positives range": ("positives", (torch.tensor([0, 1, 1, 2]), torch.tensor([3, C])), IndexError, "positives must be in [0, 20), got 20 at flat position 1"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value", "kind", "text"), BAD.values(), ids=BAD)
def test_python_layer(name, value, kind, text):
    with pytest.raises(kind, match=re.escape("sampled_softmax: ")) as caught:
        functional.sampled_softmax(**good() | {name: value})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("h", "ids"),
    [((2, B, D), (B, M)), ((2, B, D), (2, M)), ((B, D), (2, B, M)), ((D,), (1, M))],
)
def test_draws_must_have_the_leading_dimensions(h, ids):
    bad = {"h": torch.zeros(h), "ids": filled(1, ids), "log_q": torch.zeros(ids), "target": filled(1, h[:-1])}
    with pytest.raises(ValueError, match=r"sampled_softmax: ids must be .* \(per row\) or \[m\] \(shared\)"):
        functional.sampled_softmax(**good() | bad | {"positives": None})


def test_minus_one_hundred_pads_several_targets_only():
    """With one target a row, -100 is a class unless it is the ignore_index: then it is out of range."""
    with pytest.raises(IndexError, match="target must be in"):
        functional.sampled_softmax(**good() | {"target": filled(-100), "ignore_index": 7})
    padded = torch.tensor([[1, -100], [2, 3], [-100, -100]])
    args = good() | {"target": padded, "ignore_index": 7}
    rows, _, _ = sampled_softmax(**args)
    assert rows[2] == 0
    torch.testing.assert_close(functional.sampled_softmax(**args), rows[:2].mean())


# ------------------------------------------------------------------------------------------------ the raw ops
def raw(**changes) -> tuple[object, ...]:
    a = good()
    args = {
        "hidden": a["h"], "weight": a["weight"], "target": a["target"], "ids": a["ids"],
        "log_q": a["log_q"], "bias": a["bias"], "class_weight": a["class_weight"],
        "known_offsets": a["positives"][0], "known_ids": a["positives"][1], "scale": 1.0, "label_smoothing": 0.0,
        "ignore_index": -100, "reduction": 0, "absolute": False, "need_grad": True, "with_lse": True, "sparse": True,
    }  # fmt: skip
    return tuple((args | changes).values())


RAW = {
    "hidden": (torch.zeros(B, D + 1), "hidden must be [B, d] = [*, 8] float32 contiguous on cpu, got [3, 9] float32 on cpu"),
    "hidden dtype": (torch.zeros(B, D).half(), "hidden must be [B, d] = [*, 8] float32 contiguous on cpu, got [3, 8] float16 on cpu"),
    "hidden strided": (torch.zeros(D, B).T, "hidden must be [B, d] = [*, 8] float32 contiguous on cpu, got [3, 8] float32 on cpu (not contiguous)"),
    "weight": (torch.zeros(C, D, dtype=torch.int64), "weight must be float32, float64, float16 or bfloat16, got [20, 8] int64 on cpu"),
    "target": (filled(0, (B + 1,)), "target must be [B] = [3] int64 contiguous on cpu, got [4] int64 on cpu"),
    "target rows": (filled(0, (B + 1, 2)), "target must be [B, P] = [3, *] int64 contiguous on cpu, got [4, 2] int64 on cpu"),
    "target rank": (filled(0, (B, 1, 1)), "target must be [B, P] = [3, *] int64 contiguous on cpu, got [3, 1, 1] int64 on cpu"),
    "ids": (filled(0, (B, 1, 1)), "ids must be [B, m] or [m], got [3, 1, 1] int64 on cpu"),
    "ids rows": (filled(0, (B + 1, M)), "ids must be [B, m] = [3, 4] int64 contiguous on cpu, got [4, 4] int64 on cpu"),
    "ids range": (filled(C, (B, M)), "ids must be in [0, 20), got 20 at flat position 0"),
    "log_q": (torch.zeros(B, M).double(), "log_q must be [B, m] = [3, 4] float32 contiguous on cpu, got [3, 4] float64 on cpu"),
    "bias": (torch.zeros(C - 1), "bias must be [C] = [20] float32 contiguous on cpu, got [19] float32 on cpu"),
    "bias dtype": (torch.zeros(C).half(), "bias must be [C] = [20] float32 contiguous on cpu, got [20] float16 on cpu"),
    "class_weight": (torch.zeros(C, 1), "class_weight must be [C] = [20] float32 contiguous on cpu, got [20, 1] float32 on cpu"),
    "known_offsets": (filled(0, (B,)), "known_offsets must be [B + 1] = [4] int64 contiguous on cpu, got [3] int64 on cpu"),
    "known_ids": (None, "known_offsets and known_ids must be given together"),
    "label_smoothing": (2.0, "label_smoothing must be in [0, 1], got 2"),
    "reduction": (3, "reduction must be 0 (none), 1 (mean) or 2 (sum), got 3"),
}  # fmt: skip


def allocations(function) -> list[int]:
    """Bytes of every tensor storage that `function` asks torch's CPU allocator for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


@pytest.mark.parametrize("name", RAW)
def test_raw_op_raises_before_it_allocates(name):
    value, text = RAW[name]
    args = raw(**{name.split()[0]: value})

    def call():
        with pytest.raises(RuntimeError) as caught:
            torch.ops.samplex.sampled_softmax(*args)
        found = op_error(caught.value)
        assert type(found) in (IndexError, TypeError, ValueError)
        assert str(found) == f"sampled_softmax: {text}"

    assert allocations(call) == []


def test_the_allocation_counter_counts():
    assert len(allocations(lambda: torch.ops.samplex.sampled_softmax(*raw()))) >= 3


def test_no_message_shows_a_path_of_the_build():
    with pytest.raises(RuntimeError) as caught:
        torch.ops.samplex.sampled_softmax(*raw(ids=filled(C, (B, M))))
    assert not re.search(r"\.(cpp|h):\d+", str(caught.value))


@pytest.mark.parametrize(
    ("position", "value", "text"),
    [
        (0, torch.zeros(B + 1), "grad_loss must be [B] = [3] float32 contiguous on cpu, got [4] float32 on cpu"),
        (1, torch.zeros(B).double(), "grad_lse must be [B] = [3] float32"),
        (1, torch.zeros(B + 1), "grad_lse must be [B] = [3] float32"),
        (3, filled(0, (B + 1,)), "target must be [B] = [3] int64"),
        (5, torch.zeros(7), "saved must be what the forward kept = [81] float32 contiguous on cpu, got [7]"),
        (7, 1, "grad_loss must be [] = [] float32"),
        (8, False, "grad_lse must be None if the forward did not keep lse (with_lse=False)"),
    ],
)
def test_raw_backward_checks_its_tensors(position, value, text):
    a = raw()
    saved = torch.ops.samplex.sampled_softmax(*a)[2]
    args = [torch.ones(B), torch.ones(B), a[0], a[2], a[3], saved, C, 0, True, True, True]
    assert len(torch.ops.samplex.sampled_softmax_bwd(*args)) == 5
    args[position] = value
    with pytest.raises(RuntimeError, match=re.escape(f"sampled_softmax_bwd: {text}")):
        torch.ops.samplex.sampled_softmax_bwd(*args)


def test_raw_backward_leaves_out_ids_that_are_no_class():
    """The backward does not know ignore_index: an id beyond the classes must not become a row, nor crash."""
    a = raw()
    saved = torch.ops.samplex.sampled_softmax(*a)[2]
    far = filled(2**40, (B, M))
    rows = torch.ops.samplex.sampled_softmax_bwd(torch.ones(B), None, a[0], a[2], far, saved, C, 0, True, True, True)
    count = int(rows[4])
    assert rows[1][:count].tolist() == sorted(set(a[2].flatten().tolist()))


def test_backward_without_saved_gradients_is_an_error():
    a = raw(need_grad=False)
    weight = a[1].clone().requires_grad_()
    loss = torch.ops.samplex.sampled_softmax(a[0], weight, *a[2:])[0]
    with pytest.raises(RuntimeError, match=r"sampled_softmax: backward needs need_grad=True"):
        loss.sum().backward()
