"""What a fused training step may ask of a GPU: launches, synchronizations, work of the longest warp, sectors."""

from __future__ import annotations

import re

import pytest
import torch
from step_counts import count_step
from step_kinds import BATCHED, CLASSES, DIM, ENTRY, FOLLOWING, PLAIN, SPHERE, make_step

import samplex_cuda as sx
from samplex_cuda.samplers import Sampler

MOST_LAUNCHES, MOST_SORT_PASSES = 10, 4
LONGEST_WARP = 4.0
WIDE_SECTORS = 1.15


@pytest.fixture
def counts(request, ptxshim, monkeypatch):
    # CPU tensors take the way of a GPU: no look at the numbers of a tensor.
    monkeypatch.setattr("samplex_cuda._device.host_waits", lambda _: True)
    return count_step(ptxshim, make_step(request.param))


@pytest.mark.parametrize("counts", ["per row", "shared", *ENTRY], indirect=True)
def test_launches_of_a_fused_step(counts):
    assert counts.launches["aten sort inside an op"] == 1
    assert counts.total_launches <= MOST_LAUNCHES, counts.launches


@pytest.mark.parametrize("counts", ["shared bf16"], indirect=True)
def test_sixteen_bits_take_no_launch_more(counts):
    """torch multiplies 16-bit factors with sums in fp32 on CUDA alone; here it gets fp32 copies of both factors."""
    copies = counts.launches["aten copy_ inside an op"]
    assert copies == 2 * counts.launches["aten mm inside an op"] == 6
    assert counts.total_launches - copies <= MOST_LAUNCHES, counts.launches


@pytest.mark.parametrize("counts", ["per row"], indirect=True)
def test_passes_of_the_sort(counts):
    assert len(counts.sort_passes) == 1
    assert counts.sort_passes[0] <= MOST_SORT_PASSES


@pytest.mark.parametrize("counts", [*PLAIN, *ENTRY, *FOLLOWING, *SPHERE, *BATCHED], indirect=True)
def test_no_synchronization_and_capturable(counts):
    assert counts.total_launches > 5
    assert not counts.syncs
    assert not counts.violations
    assert counts.allocations == 0


# ------------------------------------------------------------------------------------------------ the longest warp
class FixedDraws(Sampler):
    """The same draws each time, so that a test chooses the duplicates."""

    _op = "fixed"
    conditional = False

    def __init__(self, ids: torch.Tensor, num_classes: int) -> None:
        super().__init__()
        self.ids, self.num_classes = ids, num_classes

    def sample(self, h, num_samples, **options):
        log_q = torch.full(self.ids.shape, -1.0)
        return sx.Draw(self.ids, log_q)

    def log_prob(self, h, ids, **options):
        return torch.full(ids.shape, -1.0)


def drawn(which: str, batch: int = 1024, m: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, m] and targets [B]."""
    distinct = torch.randperm(CLASSES)[: batch * (m + 1)].view(batch, m + 1)
    target, ids = distinct[:, 0].contiguous(), distinct[:, 1:].contiguous()
    if which == "log-uniform":
        ids = sx.samplers.LogUniform(CLASSES).sample(None, m, batch_size=batch, key=sx.Key(1)).ids
    elif which == "one class in every row":
        ids[:, 0] = 7
    return ids, target


def longest_warp(ptxshim, which: str, fused: bool) -> int:
    """Instructions of the longest warp of the kernels that sum rows and update them."""
    ids, target = drawn(which)
    head = sx.SampledClassifier(DIM, CLASSES, FixedDraws(ids, CLASSES), ids.shape[1])
    optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1)
    if fused:
        head.fuse_optimizer(optimizer)
    loss = head(torch.randn(ids.shape[0], DIM), target)
    ptxshim.launches(reset=True)
    loss.backward()
    kernels = [launch for launch in ptxshim.launches() if re.search(r"row_(rules|reduce|sum|update)", launch["kernel"])]
    assert kernels, "no kernel of the update was launched"
    assert not any(launch["rc"] for launch in kernels)
    return max(launch["max_warp_instr"] for launch in kernels)


@pytest.mark.parametrize(
    ("which", "fused"),
    [
        pytest.param("log-uniform", True, id="update-log-uniform"),
        pytest.param("one class in every row", True, id="update-one-class"),
        pytest.param("log-uniform", False, id="reduction-log-uniform"),
        pytest.param("one class in every row", False, id="reduction-one-class"),
    ],
)
def test_no_warp_works_for_the_others(ptxshim, which, fused):
    distinct = longest_warp(ptxshim, "distinct", fused)
    longest = longest_warp(ptxshim, which, fused)
    print(f"{which}: {longest} of {distinct} instructions, {longest / distinct:.1f} times")
    assert longest <= LONGEST_WARP * distinct


# ------------------------------------------------------------------------------------------------ sectors
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [1024, 4096])
def test_wide_rows_are_read_once(profile_cuda, dim, dtype):
    fewest = profile_cuda.fewest_sectors(dim, dtype)
    found = profile_cuda.run("sampled_softmax", f"{dim}:{dtype}")
    ratios = {mode: sum(launch["sectors"] for launch in got["launches"]) / fewest for mode, got in found.items()}
    print(f"d = {dim}, {dtype}: {ratios}")
    assert set(ratios) == {"training", "no_grad"}
    assert max(ratios.values()) <= WIDE_SECTORS
