"""Bad input of the losses that are sums over entries: each names op, argument, wanted and got, before anything is allocated."""

# ruff: noqa: E501  (tables of messages)
from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from samplex_cuda import _native, functional
from samplex_cuda.reference import entry_loss

NAN, INF = float("nan"), float("inf")
OP = torch.ops.samplex.entry_loss.default
OP_BWD = torch.ops.samplex.entry_loss_bwd.default
B, M, D, C = 3, 4, 8, 20


def good() -> dict[str, Any]:
    """Arguments of a call that works."""
    return {
        "h": torch.randn(B, D), "weight": torch.randn(C, D), "target": torch.arange(B), "ids": torch.arange(B * M).view(B, M),
        "log_q": torch.full((B, M), -1.0), "target_log_q": torch.full((B,), -1.0), "bias": torch.zeros(C),
        "class_weight": torch.ones(C), "reg": 0.1,
    }  # fmt: skip


META = torch.device("meta")
BAD = {
    "h dim": ("h", torch.zeros(B, 7), ValueError, "h must be [*, 8] to fit weight [20, 8], got [3, 7] float32 on cpu"),
    "h dtype": ("h", torch.zeros(B, D).double(), TypeError, "h must be torch.float32 like weight (or run under autocast)"),
    "weight rank": ("weight", torch.zeros(C), ValueError, "weight must be [C, d] float32, float64, float16 or bfloat16"),
    "target rows": ("target", torch.zeros(2, dtype=torch.int64), ValueError, "to fit h [3, 8], got [2] int64"),
    "target dtype": ("target", torch.zeros(B), TypeError, "target must be int64, got [3] float32"),
    "ids dtype": ("ids", torch.zeros(B, M), TypeError, "ids must be int64, got [3, 4] float32"),
    "ids None": ("ids", None, TypeError, "ids must be a tensor [*, m] or [m] int64, got NoneType"),
    "log_q shape": ("log_q", torch.zeros(B, M + 1), ValueError, "log_q must have the shape of ids [3, 4], got [3, 5] float32"),
    "log_q device": ("log_q", torch.zeros(B, M, device=META), ValueError, "log_q must be on cpu like weight"),
    "target_log_q None": ("target_log_q", None, ValueError, "target_log_q must be [3] if reg is not 0, got None"),
    "target_log_q shape": ("target_log_q", torch.zeros(B, 1), ValueError, "target_log_q must be [3] floating point on cpu, got [3, 1] float32 on cpu"),
    "positives": ("positives", (torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)), ValueError, "positives must be (offsets [4], ids [n])"),
    "target_log_q dtype": ("target_log_q", torch.zeros(B, dtype=torch.int64), ValueError, "target_log_q must be [3] floating point on cpu, got [3] int64"),
    "target_log_q list": ("target_log_q", [0.0] * B, TypeError, "target_log_q must be a tensor [3] floating point, got list"),
    "bias shape": ("bias", torch.zeros(C + 1), ValueError, "bias must be [20] float32 on cpu, got [21] float32"),
    "class_weight shape": ("class_weight", torch.ones(C, 1), ValueError, "class_weight must be [20]"),
    "ids high": ("ids", torch.full((B, M), C), IndexError, "ids must be in [0, 20), got 20 at flat position 0"),
    "target low": ("target", torch.tensor([0, -1, 2]), IndexError, "target must be in [0, 20) or ignore_index, got -1 at flat position 1"),
    "reg negative": ("reg", -0.1, ValueError, "reg must be finite and at least 0, got -0.1"),
    "reg nan": ("reg", NAN, ValueError, "reg must be finite and at least 0, got nan"),
    "reg inf": ("reg", INF, ValueError, "reg must be finite and at least 0, got inf"),
    "reduction": ("reduction", "average", ValueError, "reduction must be one of none, mean, sum, got 'average'"),
}  # fmt: skip


def test_the_good_call_works():
    args = good()
    rows, _ = entry_loss.negative_sampling(**args)
    torch.testing.assert_close(functional.negative_sampling(**args), rows.mean())


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("name", "value", "kind", "text"), BAD.values(), ids=BAD)
def test_errors_name_op_argument_wanted_and_got(name, value, kind, text, plain):
    args = good()
    if plain and name not in ("bias", "class_weight"):  # the fast path to the op
        args["bias"] = args["class_weight"] = None
    with pytest.raises(kind, match=re.escape("negative_sampling: ")) as caught:
        functional.negative_sampling(**args | {name: value})
    assert text in str(caught.value)


OTHERS = {
    "nce without": ("nce", {"target_log_q": None}, ValueError, "target_log_q must be [3], got None"),
    "nce shape": ("nce", {"target_log_q": torch.zeros(B + 1)}, ValueError, "target_log_q must be [3] floating point"),
    "nce several": ("nce", {"target": torch.zeros(B, 2, dtype=torch.int64), "target_log_q": torch.zeros(B)}, ValueError, "target_log_q must be [3, 2] floating point on cpu, got [3] float32"),
    "nce ids": ("nce", {"ids": torch.full((B, M), C), "target_log_q": torch.zeros(B)}, IndexError, "ids must be in [0, 20), got 20 at flat position 0"),
    "one_vs_each target": ("one_vs_each", {"target": torch.tensor([0, 20, 2])}, IndexError, "target must be in [0, 20) or ignore_index, got 20 at flat position 1"),
    "one_vs_each padding": ("one_vs_each", {"target": torch.tensor([[0, -100], [1, -7], [2, 3]])}, IndexError, "target must be in [0, 20) or ignore_index, got -7 at flat position 3"),
    "one_vs_each positives": ("one_vs_each", {"positives": (torch.tensor([0, 2, 1, 3]), torch.zeros(3, dtype=torch.int64))}, ValueError, "positives offsets must ascend from 0 to 3"),
    "augment_reduce without": ("augment_reduce", {"log_eta": None}, ValueError, "log_eta must be [3], got None"),
    "augment_reduce shape": ("augment_reduce", {"log_eta": torch.zeros(B, 1)}, ValueError, "log_eta must be [3] floating point on cpu, got [3, 1] float32"),
    "augment_reduce kind": ("augment_reduce", {"log_eta": 1.0}, TypeError, "log_eta must be a tensor [3] floating point, got float"),
}  # fmt: skip


@pytest.mark.parametrize(("op", "given", "kind", "text"), OTHERS.values(), ids=OTHERS)
def test_errors_of_the_others(op, given, kind, text):
    args = {name: good()[name] for name in ("h", "weight", "target", "ids", "log_q")} | given
    with pytest.raises(kind, match=re.escape(f"{op}: ")) as caught:
        getattr(functional, op)(**args)
    assert text in str(caught.value)


RAW = {
    0: (torch.zeros(B, D + 1), "hidden must be [B, d] = [*, 8] float32 contiguous on cpu, got [3, 9] float32 on cpu"),
    2: (torch.zeros(B + 1, dtype=torch.int64), "target must be [B] = [3] int64 contiguous on cpu, got [4] int64 on cpu"),
    3: (torch.zeros(B, 1, 1, dtype=torch.int64), "ids must be [B, m] or [m], got [3, 1, 1] int64 on cpu"),
    4: (torch.zeros(B, M).double(), "log_q must be [B, m] = [3, 4] float32 contiguous on cpu, got [3, 4] float64 on cpu"),
    5: (None, "target_log_q must be [B] if reg is not 0, got None"),
    6: (torch.zeros(B + 1), "log_eta must be [B] = [3] float32"),
    7: (torch.zeros(C + 1), "bias must be [C] = [20] float32 contiguous on cpu, got [21] float32 on cpu"),
    9: (torch.zeros(B + 1, dtype=torch.int64), "known_offsets and known_ids must be given together"),
    13: (-1.0, "reg must be at least 0, got -1"),
    15: (3, "reduction must be 0 (none), 1 (mean) or 2 (sum), got 3"),
}  # fmt: skip


def raw(kind: int = 0) -> list[Any]:
    a = good()
    names = ("h", "weight", "target", "ids", "log_q", "target_log_q")
    return [*(a[n] for n in names), None, a["bias"], a["class_weight"], None, None, kind, 1.0, 0.1, -100, 0, True, True]


@pytest.mark.parametrize("at", RAW)
def test_the_raw_op_checks_for_itself(at):
    args = raw()
    assert len(OP(*args)) == 2
    args[at] = RAW[at][0]
    with pytest.raises(RuntimeError, match=re.escape(f"negative_sampling: {RAW[at][1]}")):
        OP(*args)


@pytest.mark.parametrize(
    ("kind", "reg", "text"),
    [
        (1, 0.1, "nce: reg must be 0, got 0.1"),
        (1, 0.0, "nce: target_log_q must be [B], got None"),
        (3, 0.0, "augment_reduce: log_eta must be [B], got None"),
        (
            4,
            0.0,
            "entry_loss: kind must be 0 (negative_sampling), 1 (nce), 2 (one_vs_each) or 3 (augment_reduce), got 4",
        ),
    ],
)
def test_the_raw_op_checks_what_each_loss_needs(kind, reg, text):
    args = raw(kind)
    args[5], args[13] = (None if reg == 0 else args[5]), reg
    with pytest.raises(RuntimeError, match=re.escape(text)):
        OP(*args)


def test_the_raw_backward_checks_for_itself():
    args = raw()
    loss, saved = OP(*args)
    bwd = [loss, args[0], args[2], args[3], saved, 0, C, 0, True, False]
    assert len(OP_BWD(*bwd)) == 5
    for at, value, text in (
        (0, loss[:2], "negative_sampling_bwd: grad_loss must be [B] = [3] float32"),
        (2, args[2][:2], "negative_sampling_bwd: target must be [B] = [3] int64"),
        (4, saved[:-1].clone(), "negative_sampling_bwd: saved must be what the forward kept"),
        (5, 3, "augment_reduce_bwd: saved must be what the forward kept"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(text)):
            OP_BWD(*bwd[:at], value, *bwd[at + 1 :])


def test_need_grad_false_has_no_backward():
    args = raw()
    args[1].requires_grad_()
    args[16] = False
    loss, _ = OP(*args)
    with pytest.raises(RuntimeError, match="negative_sampling: backward needs need_grad=True"):
        loss.sum().backward()


@pytest.mark.skipif(not _native.build_info()["test_backends"], reason="needs the SIMT harness")
def test_the_debug_check_lets_good_ids_pass():
    script = """
import torch, samplex_cuda as sx
sx._native.set_cpu_backend("simt")
h, w, y = torch.zeros(2, 4), torch.zeros(3, 4), torch.tensor([1, -100])
print(sx.functional.negative_sampling(h, w, y, torch.tensor([[2], [0]]), torch.zeros(2, 1)).item())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"SAMPLEX_DEBUG": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1.386")
