"""Contiguous inputs that begin anywhere, as `buffer[1:].view(B, d)` does: every op takes them.

A few tables that samplers build are read as vectors everywhere: those are refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fuzz"))

from samplex_fuzz import registry
from samplex_fuzz.call import GENERATORS, Args, Call, Dice

OPS = sorted(registry.registered_ops())
# Tables that are read as vectors in every kernel: built once by a sampler, aligned by torch's allocator.
REFUSED = {
    "table": (
        "alias_sample", "alias_log_prob", "bigram_sample", "bigram_log_prob", "sampled_softmax_static",
        "entry_loss_static", "augment_reduce_static_",
    ),
    "pair_table": ("bigram_sample", "bigram_log_prob"),
    "nodes": (
        "tree_sample", "tree_log_prob", "tree_log_prob_all", "tree_topk", "tree_sample_and_score",
        "tree_sample_shared", "tree_log_prob_shared",
    ),
    "rows": ("kernel_tree_sample", "kernel_tree_log_prob"),
    "sums": (
        "kernel_tree_sample", "kernel_tree_log_prob", "kernel_tree_build", "kernel_tree_update", "kernel_tree_parents",
    ),
}  # fmt: skip
ON_A_GPU = frozenset({"nodes"})  # refused there alone: a packaged program may load a tree at any address of the host


def is_refused(table: str, backend: Any) -> bool:
    """Whether a kernel of this backend needs the table aligned."""
    return table not in ON_A_GPU or backend.name != "cpu"


def off(t: Tensor) -> Tensor:
    """A contiguous copy that begins one number behind the start of its memory."""
    buffer = t.new_empty(t.numel() + 1)
    copy = buffer[1:].view(t.shape).copy_(t)
    assert copy.is_contiguous()
    assert t.numel() == 0 or copy.data_ptr() % 16 != 0
    return copy


def shifted(args: Args, keep: frozenset[str] = frozenset()) -> Args:
    """The same arguments, every tensor but those named moved to memory that begins anywhere."""
    return Args({k: off(x) if isinstance(x, Tensor) and k not in keep else x for k, x in args.items()})


def copied(args: Args) -> Args:
    return Args({k: x.clone() if isinstance(x, Tensor) else x for k, x in args.items()})


def valid_calls(name: str, seed: int, count: int) -> Iterator[Call]:
    """Calls of an op that work with aligned inputs: a generator makes some that are refused."""
    for number in range(count):
        call = GENERATORS[name](Dice(seed, number))
        call.args = Args({k: x.detach() if isinstance(x, Tensor) else x for k, x in call.args.items()})
        try:
            call.run(copied(call.args))
        except RuntimeError as error:
            if not str(error).startswith("ValueError: "):
                raise
            continue
        yield call


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", OPS)
def test_every_op_takes_misaligned_inputs(name, backend):
    keep = frozenset(k for k, ops in REFUSED.items() if name in ops and is_refused(k, backend))
    seen = 0
    for call in valid_calls(name, 5, 16 if backend.emulated else 24):
        args = shifted(call.args, keep)
        before = copied(args)
        call.check(before, call.run(args), args, set())
        seen += 1
    assert seen >= 4


@pytest.mark.parametrize(("table", "name"), [(t, n) for t, names in REFUSED.items() for n in names])
def test_a_misaligned_table_is_refused_by_name(table, name, backend):
    if not is_refused(table, backend):
        pytest.skip(f"the CPU takes {table} at any address")
    seen = 0
    for call in valid_calls(name, 6, 12):
        t = call.args[table]
        if t is None or t.numel() == 0:
            continue
        seen += 1
        call.args[table] = off(t)
        with pytest.raises(RuntimeError, match=f"{table} must be aligned to .* bytes.*, got a view that is not"):
            call.run(call.args)
    assert seen > 0
