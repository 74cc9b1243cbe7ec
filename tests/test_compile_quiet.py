"""`torch.compile` of a model with a head: quiet, with the results of eager mode; or one clear error."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from head_cases import C, D, batch, make

import samplex_cuda as sx

SCRIPT = """
import torch, samplex_cuda as sx
kind = {kind!r}
torch.manual_seed(0)
sampler = sx.samplers.Quadratic(torch.randn(200, 16)) if "quadratic" in kind else sx.samplers.LogUniform(200)
head = sx.SampledClassifier(16, 200, sampler, num_samples=5, bias=False)
if "fused" in kind:
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
encoder = torch.nn.Linear(8, 16)
step = torch.compile(lambda x, y: head(encoder(x).relu(), y), backend="aot_eager")
for _ in range(3):
    step(torch.randn(6, 8), torch.randint(200, (6,))).backward()
assert float(encoder.weight.grad.abs().sum()) > 0
assert (head.weight.grad is None) == ("fused" in kind)
if "fused" not in kind:
    assert head.weight.grad.is_sparse
"""


@pytest.mark.parametrize("kind", ["static", "quadratic", "static fused"])
def test_compile_is_quiet(kind):
    """In a separate process, because torch's compiler logs to stderr."""
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(kind=kind)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_steps_are_those_of_eager_mode(fullgraph):
    torch._dynamo.reset()
    head, h, y = make(), *batch()
    key = sx.Key(3).reserve()
    eager = head(h, y, key=key)
    eager.backward()
    wanted, head.weight.grad = head.weight.grad.to_dense(), None
    compiled = torch.compile(head, backend="aot_eager", fullgraph=fullgraph)
    loss = compiled(h, y, key=key)
    loss.backward()
    torch.testing.assert_close(loss, eager)
    assert head.weight.grad.is_sparse
    torch.testing.assert_close(head.weight.grad.to_dense(), wanted)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_attention_pool(fullgraph):
    torch._dynamo.reset()
    table, vectors = torch.randn(C, D, requires_grad=True), torch.randn(2, D)
    ids = torch.randint(0, C, (3, 5))

    def step(t):
        return sx.functional.attention_pool(ids, t, vectors[0], vectors[1]).sum()

    (wanted,) = torch.autograd.grad(step(table), table)
    torch.compile(step, backend="aot_eager", fullgraph=fullgraph)(table).backward()
    torch.testing.assert_close(table.grad.to_dense(), wanted.to_dense())


@pytest.mark.parametrize("kind", ["follows", "fused"])
def test_fullgraph_says_what_stands_against_it(kind):
    torch._dynamo.reset()
    head = make(sampler=sx.samplers.Quadratic(torch.randn(C, D)), bias=False) if kind == "follows" else make()
    if kind == "fused":
        head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    words = "a head with a fused optimizer, or with a sampler that follows the class table.*sampler_update=None"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        compiled(*batch())
    torch._dynamo.reset()


def test_a_fixed_kernel_sampler_stays_in_the_graph():
    """What the error advises works."""
    torch._dynamo.reset()
    head = make(sampler=sx.samplers.Quadratic(torch.randn(C, D)), bias=False, sampler_update=None)
    h, y = batch()
    key = sx.Key(3).reserve()
    wanted = head(h, y, key=key)
    found = torch.compile(head, backend="aot_eager", fullgraph=True)(h, y, key=key)
    torch.testing.assert_close(found, wanted)
    torch._dynamo.reset()
