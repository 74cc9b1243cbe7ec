"""Errors of the ops: the code in front of the message, and the Python error it becomes."""

from __future__ import annotations

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda._checks import call, op_error
from samplex_cuda.optim import rules

OPS = torch.ops.samplex


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("IndexError: op: ids must be in [0, 3), got 5", IndexError, "op: ids must be in [0, 3), got 5"),
        ("ValueError: op: x must be [B]\nException raised from …", ValueError, "op: x must be [B]"),
        ("TypeError: op: x must be float32, got [2] int64", TypeError, "op: x must be float32, got [2] int64"),
        ("op: ids must be in [0, 3), got 5", RuntimeError, "op: ids must be in [0, 3), got 5"),
        ("KeyError: 3", RuntimeError, "KeyError: 3"),
        ("CUDA error: IndexError: no", RuntimeError, "CUDA error: IndexError: no"),
        ("", RuntimeError, ""),
    ],
)
def test_op_error_goes_by_the_prefix(text, kind, message):
    given = RuntimeError(text)
    got = op_error(given)
    assert type(got) is kind
    assert str(got) == message
    assert (got is given) == (kind is RuntimeError)


def test_other_errors_pass_through():
    memory = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        call(lambda: (_ for _ in ()).throw(memory).__next__())
    assert caught.value is memory
    with pytest.raises(RuntimeError, match="size of tensor"):
        call(lambda: torch.zeros(2) + torch.zeros(3))
    assert call(lambda: 3) == 3


def _loss(target: int = 1, ids: int = 2, **changes: object) -> object:
    h, weight = torch.randn(2, 4), torch.randn(5, 4)
    arguments = {"target": torch.tensor([0, target]), "ids": torch.full((2, 3), ids), "log_q": torch.zeros(2, 3)}
    arguments.update(changes)
    return OPS.sampled_softmax(
        h, weight, arguments["target"], arguments["ids"], arguments["log_q"], None, None, None, None, 1.0, 0.0, -100, 1,
        False, True, False, True, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("run", "prefix"),
    [
        (lambda: _loss(target=5), "IndexError: sampled_softmax: target must be in"),
        (lambda: _loss(ids=-1), "IndexError: sampled_softmax: ids must be in"),
        (lambda: _loss(log_q=torch.zeros(2, 3, dtype=torch.float64)), "TypeError: sampled_softmax: log_q must be"),
        (lambda: _loss(log_q=torch.zeros(2, 4)), "ValueError: sampled_softmax: log_q must be"),
        (lambda: OPS.rff(torch.zeros(2, 3, dtype=torch.int64), None, 2), "TypeError: rff: x must"),
        (
            lambda: OPS.row_reduce(
                torch.tensor([[9]]), None, torch.ones(1, 2), torch.zeros(0, 1).long(), None, torch.ones(0, 2), 5, False
            ),
            "IndexError: row_reduce: ids must be below",
        ),
        (
            lambda: OPS.row_apply_(
                torch.ones(3, 2),
                torch.ones(3, 2),
                None,
                torch.tensor([3]),
                torch.ones(1, 2),
                None,
                None,
                rules.adagrad(0.1, 1e-8, 0.0, False),
            ),
            "IndexError: row_apply_: row_ids must be in",
        ),
    ],
)
def test_ops_put_the_kind_first(run, prefix):
    _loss()  # as it stands there is nothing wrong with it
    with pytest.raises(RuntimeError) as caught:
        run()
    assert str(caught.value).startswith(prefix)


def test_python_raises_the_kind():
    sampler = sx.samplers.Uniform(5)
    with pytest.raises(IndexError, match=r"^\w+: exclude must be -1 or in \[0, 5\), got 7 in row 1$"):
        sampler.sample(None, 3, batch_size=2, exclude=torch.tensor([0, 7]))
    h, weight = torch.randn(2, 4), torch.randn(5, 4)
    draws = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    with pytest.raises(IndexError, match=r"^sampled_softmax: target must be in \[0, 5\)"):
        sx.functional.sampled_softmax(h, weight, torch.tensor([0, 5]), *draws)
