"""The budgets of a fused step on tensors that say `device="cuda"`: torch's CUDA build, the emulated runtime, no GPU.

`python scripts/side_build.py emulated --ptxrun DIR --cuda-torch PYTHON` runs them. Allocator, streams, events and graph
capture are torch's own here; torch's kernels are served by its CPU ones, ours are nvcc's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from step_kinds import BATCHED, DIM, ENTRY, FOLLOWING, PLAIN, SPHERE, make_step

import samplex_cuda as sx
from samplex_cuda import _native

ptxtorch = sys.modules.get("ptxtorch")
pytestmark = pytest.mark.skipif(ptxtorch is None, reason="not started by ptxtorch.py with a CUDA build of torch")

MOST_LAUNCHES = 10
STEPS = [*PLAIN, *ENTRY, *FOLLOWING, *SPHERE, *BATCHED]


def warm_step(kind: str, *, capturable: bool) -> Callable[[], None]:
    step = make_step(kind, device="cuda", capturable=capturable)
    for _ in range(3):
        step()
    return step


def kernels(runtime) -> dict[str, int]:
    return {name: found["launches"] for name, found in runtime.get("kernels", {}).items()}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kind", STEPS)
def test_the_host_never_waits(kind, capturable):
    step = warm_step(kind, capturable=capturable)
    with ptxtorch.count_ops() as ops:
        step()
    assert sum(kernels(ops.shim).values()) >= 4, "nothing was launched: is the runtime the static one?"
    assert not ops.syncs
    assert ops.shim.get("sync_total", 0) == 0
    assert not any("blocking" in found or "async_pageable" in found for found in ops.shim.get("memcpy", {}).values())
    assert not any(ops.shim.get(name, 0) for name in ("cuda_mallocs", "host_allocs", "async_mallocs", "frees"))


@pytest.mark.parametrize("kind", ["per row", "shared", "shared bf16", *ENTRY])
def test_launches(kind):
    """What the runtime saw of ours, what torch's kernels would be (`served`: inside of our ops, too), copies."""
    step = warm_step(kind, capturable=False)
    with ptxtorch.count_ops() as ops:
        step()
    copies = sum(count for name, count in ops.copies.items() if name.startswith("d2d"))
    total = sum(kernels(ops.shim).values()) + sum(ops.served.values()) + copies
    print(total, kernels(ops.shim), dict(ops.served), dict(ops.copies))
    assert ops.served["sort.stable"] == 1
    assert total <= MOST_LAUNCHES


@pytest.mark.parametrize("kind", STEPS)
def test_a_graph_can_hold_the_step(kind):
    step = warm_step(kind, capturable=True)
    with ptxtorch.capture() as captured:
        step()
    assert len(captured.nodes) >= 4
    assert not captured.violations, captured


def test_losses_of_two_streams_are_waited_for():
    """An event of each loss, and a wait for it before the update: the emulated runtime keeps the calls."""
    head = sx.SampledClassifier(8, 50, sx.samplers.LogUniform(50), 5).cuda()
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    h, y = torch.randn(6, 8, device="cuda"), torch.randint(50, (6,), device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()

    def events(streams) -> tuple[int, int]:
        losses = []
        for stream in streams:
            with torch.cuda.stream(stream):
                losses.append(head(h, y))
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            total = losses[0] + losses[1]
            ptxtorch.counters_reset()
            total.backward()
        api = ptxtorch.counters()["api"]
        return api.get("cudaEventRecord", 0) + api.get("cudaEventRecordWithFlags", 0), api.get("cudaStreamWaitEvent", 0)

    (_, alone), (recorded, waited) = events([first, first]), events([first, second])
    print(f"waits: {alone} of one stream, {waited} of two")
    assert recorded >= waited > alone


@pytest.mark.parametrize("loss", ["sampled_softmax", "negative_sampling", "nce", "one_vs_each"])
def test_factors_of_products_are_aligned(loss):
    """With 50 draws, too: tensor cores take rows that begin at multiples of 16 bytes."""
    import emulated_products

    head = sx.SampledClassifier(DIM, 500, sx.samplers.LogUniform(500), 50, loss=loss, shared=True)
    head.to("cuda", torch.bfloat16)
    h = torch.randn(7, DIM).to("cuda", torch.bfloat16).requires_grad_(True)
    emulated_products.steps.clear()
    head(h, torch.randint(500, (7,)).cuda()).backward()
    assert len(emulated_products.steps) == 9  # three products
    assert not any(step % 16 for step in emulated_products.steps), emulated_products.steps


def test_this_build_runs_on_the_device():
    assert _native.build_info()["cuda"]
    before = ptxtorch.shim().ptxrun_launches()
    make_step("per row", device="cuda")()
    assert ptxtorch.shim().ptxrun_launches() > before
