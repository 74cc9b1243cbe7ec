"""What a fused training step may ask of a GPU: launches, synchronizations, work of the longest warp, sectors."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from step_counts import count_step
from step_kinds import BATCHED, CLASSES, DIM, ENTRY, EXAMPLE, FOLLOWING, FULL, PLAIN, SPHERE, make_step

import samplex_cuda as sx
from samplex_cuda import chunking
from samplex_cuda.ops import predict
from samplex_cuda.samplers import Sampler

MOST_LAUNCHES, MOST_SORT_PASSES = 10, 4
LONGEST_WARP = 4.0
WIDE_SECTORS = 1.15


@pytest.fixture
def counts(request, ptxshim, monkeypatch):
    # CPU tensors take the way of a GPU: no look at the numbers of a tensor.
    monkeypatch.setattr("samplex_cuda._device.host_waits", lambda _: True)
    return count_step(ptxshim, make_step(request.param))


def _model():
    """bench/gpu_model.py, whose page shows what is counted here."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
    try:
        return importlib.import_module("gpu_model")
    finally:
        sys.path.pop(0)


def test_every_counted_step_is_one_of_these():
    kinds = {*PLAIN, *ENTRY, *FOLLOWING, *SPHERE, *BATCHED, *EXAMPLE, *FULL}
    assert set(_model().COUNTED) <= kinds


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


@pytest.mark.parametrize("counts", [*PLAIN, *ENTRY, *FOLLOWING, *SPHERE, *BATCHED, *EXAMPLE, *FULL], indirect=True)
def test_no_synchronization_and_capturable(request, counts):
    counted = _model().COUNTED
    kind = request.node.callspec.params["counts"]
    assert counts.total_launches == counted.get(kind, counts.total_launches) > 5, "run python bench/gpu_model.py"
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


# Adam's table of a million rows of 512 would be 6 GB with its states.
CLASSES_OF = {32: CLASSES, 128: CLASSES // 4, 512: CLASSES // 16}


def drawn(which: str, batch: int = 1024, m: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, m] and targets [B]."""
    distinct = torch.randperm(CLASSES)[: batch * (m + 1)].view(batch, m + 1)
    target, ids = distinct[:, 0].contiguous(), distinct[:, 1:].contiguous()
    if which == "log-uniform":
        ids = sx.samplers.LogUniform(CLASSES).sample(None, m, batch_size=batch, key=sx.Key(1)).ids
    elif which == "one class in every row":
        ids[:, 0] = 7
    return ids, target


RULES = {
    "adagrad": lambda p: sx.optim.RowAdagrad(p, lr=0.1),
    "row-wise": lambda p: sx.optim.RowAdagrad(p, lr=0.1, rowwise=True),
    "adam": lambda p: sx.optim.RowAdam(p, lr=0.1),
}


def longest_warp(
    ptxshim, which: str, fused: bool, dim: int = DIM, dtype: str = "float32", rule: str = "adagrad", batch: int = 1024
) -> int:
    """Instructions of the longest warp of the kernels that sum rows and update them."""
    ids, target = drawn(which, batch)
    ids, target = (t % CLASSES_OF[dim] for t in (ids, target))
    head = sx.SampledClassifier(dim, CLASSES_OF[dim], FixedDraws(ids, CLASSES_OF[dim]), ids.shape[1])
    head.to(getattr(torch, dtype))
    optimizer = RULES[rule](head.parameters())
    if fused:
        head.fuse_optimizer(optimizer)
    loss = head(torch.randn(ids.shape[0], dim).to(head.weight.dtype), target)
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


# Log-uniform draws of 256 rows: class 0 has 850 of 16,640 entries, class 7 of the other case 256.
@pytest.mark.parametrize("which", ["log-uniform", "one class in every row"])
@pytest.mark.parametrize(
    ("dim", "dtype", "rule", "fused"),
    [
        (128, "float32", "adagrad", True),
        (128, "bfloat16", "adagrad", True),
        (128, "float32", "row-wise", True),
        (128, "float32", "adam", True),
        (512, "float32", "adagrad", True),
        (512, "float32", "row-wise", True),
        (512, "bfloat16", "row-wise", True),
        (512, "bfloat16", "adam", True),
        (32, "bfloat16", "adam", True),
        (128, "float32", "adagrad", False),
        (128, "bfloat16", "adagrad", False),
        (512, "float32", "adagrad", False),
    ],
)
def test_no_warp_works_for_the_others_at_any_width(ptxshim, which, dim, dtype, rule, fused):
    case = {"dim": dim, "dtype": dtype, "rule": rule, "batch": 256}
    distinct = longest_warp(ptxshim, "distinct", fused, **case)
    longest = longest_warp(ptxshim, which, fused, **case)
    print(f"{which}, {case}: {longest} of {distinct} instructions, {longest / distinct:.1f} times")
    assert longest <= LONGEST_WARP * distinct


# ------------------------------------------------------------------------------------------------ one row's forward
def forward_warp(ptxshim, batch=4, m=64, dim=128, dtype="float32", **options) -> int:
    """Instructions of the longest warp of the fused forward."""
    h, weight = torch.randn(batch, dim), torch.randn(CLASSES // 100, dim)
    h, weight = (t.to(getattr(torch, dtype)).requires_grad_() for t in (h, weight))
    ids, target = torch.randint(weight.shape[0], (batch, m)), torch.randint(weight.shape[0], (batch,))
    ptxshim.launches(reset=True)
    sx.functional.sampled_softmax(h, weight, target, ids, torch.full(ids.shape, -5.0), **options)
    found = [x for x in ptxshim.launches() if "sampled_softmax" in x["kernel"]]
    assert found
    assert not any(x["rc"] for x in found)
    return max(x["max_warp_instr"] for x in found)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_long_list_of_positives_is_read_by_the_warp(ptxshim, smoothing):
    """5,000 positives of each row: before, each lane went through all of them for each of its draws."""
    counts = torch.arange(5) * 5000
    known = (counts, torch.randint(CLASSES // 100, (20_000,)))
    plain = forward_warp(ptxshim, label_smoothing=smoothing)
    listed = forward_warp(ptxshim, label_smoothing=smoothing, positives=known)
    passes = 1 if smoothing == 0.0 else 5  # with smoothing the kernel asks again: it keeps no marks
    print(f"{listed} of {plain} instructions")
    assert listed - plain < passes * 3.5 * 5000


@pytest.mark.parametrize(("dim", "dtype"), [(128, "float32"), (128, "bfloat16"), (1024, "float32")])
@pytest.mark.parametrize("margin", [None, sx.losses.ArcFace(0.5)])
def test_unit_rows_take_no_longer_warp(ptxshim, dim, dtype, margin):
    plain = forward_warp(ptxshim, dim=dim, dtype=dtype)
    unit = forward_warp(ptxshim, dim=dim, dtype=dtype, normalize=True, margin=margin)
    print(f"d = {dim}, {dtype}: {unit} of {plain} instructions, {unit / plain:.2f} times")
    assert unit < 1.75 * plain


# ------------------------------------------------------------------------------------------------ sectors
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [128, 1024])
def test_unit_rows_are_read_once(profile_cuda, dim, dtype):
    fewest = profile_cuda.fewest_sectors(dim, dtype)
    found = profile_cuda.run("sampled_softmax", f"sphere:{dim}:{dtype}")
    ratios = {mode: sum(launch["sectors"] for launch in got["launches"]) / fewest for mode, got in found.items()}
    print(f"d = {dim}, {dtype}: {ratios}")
    assert max(ratios.values()) <= WIDE_SECTORS


@pytest.mark.parametrize("work", ["lse", "grad", "topk"])
def test_sectors_of_logits_whose_number_is_odd(ptxshim, work):
    """C = 50,257: rows begin at multiples of 64 bytes, so that all but their ends is read 16 bytes at a time."""
    rows, columns = 4, 50_257
    chunk = torch.empty(rows, chunking._row_stride(columns, torch.empty(0, device="meta")))[:, :columns].normal_()
    sums, target = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, 1, dtype=torch.int64)
    whole = torch.randn(rows, columns // 16 * 16)
    counts = []
    for dots in (chunk, whole):
        ptxshim.launches(reset=True)
        if work == "lse":
            predict.predict_lse(dots, None, target, None, 0, 1.0, False, sums.clone(), torch.zeros(rows, 1))
        elif work == "grad":
            one = torch.ones(rows)
            predict.predict_grad(dots, None, target, None, 0, 1.0, False, sums, one, one.view(-1, 1))
        else:
            values, ids = torch.zeros(rows, 10), torch.zeros(rows, 10, dtype=torch.int64)
            predict.predict_topk(dots, None, 0, 1.0, False, values, ids)
        counts.append(sum(x["mean_warp_instr"] * x["warps"] for x in ptxshim.launches()))
    print(work, counts)
    assert counts[0] < 1.1 * counts[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [1024, 4096])
def test_wide_rows_are_read_once(profile_cuda, dim, dtype):
    fewest = profile_cuda.fewest_sectors(dim, dtype)
    found = profile_cuda.run("sampled_softmax", f"{dim}:{dtype}")
    ratios = {mode: sum(launch["sectors"] for launch in got["launches"]) / fewest for mode, got in found.items()}
    print(f"d = {dim}, {dtype}: {ratios}")
    assert set(ratios) == {"training", "no_grad"}
    assert max(ratios.values()) <= WIDE_SECTORS
