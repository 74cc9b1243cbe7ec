"""Class tables on the host, in memory or in a file, with an encoder on another device.

A CPU plays both devices in most tests: tensors marked `far` count as those of the other device, and every move between
the two is a copy. `test_rows_cross_to_a_gpu` runs where torch sees a GPU (or an emulated one).
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import samplex_cuda as sx
from samplex_cuda.heads import host

C, D, B, M = 300, 16, 12, 20


class Far:
    """What crosses between the two sides, when a CPU plays both."""

    def __init__(self) -> None:
        self.moved: list[Tensor] = []

    def far(self, t: Tensor) -> Tensor:
        t._far = True  # type: ignore[attr-defined]
        return t

    def crosses(self, h: Tensor, table: Tensor) -> bool:
        return getattr(h, "_far", False)

    def to_side(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, Tensor):
            self.moved.append(value)
            return value.clone()
        if isinstance(value, sx.Negatives):
            return sx.Negatives(self.to_side(value.ids, device), self.to_side(value.log_q, device))
        if isinstance(value, sx.Draw):
            return sx.Draw(self.to_side(value.ids, device), self.to_side(value.log_q, device), value.independent)
        if type(value) is tuple:
            return tuple(self.to_side(part, device) for part in value)
        return value


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Far:
    found = Far()
    monkeypatch.setattr(host, "crosses", found.crosses)
    monkeypatch.setattr("samplex_cuda.heads.classifier.crosses", found.crosses)
    monkeypatch.setattr(host, "to_side", found.to_side)
    # The head must not take the shortest path, which compares devices.
    monkeypatch.setattr(sx.SampledClassifier, "_plain_loss", lambda *_: None)
    return found


def pair(compute: str = "device", **options: Any) -> tuple[sx.SampledClassifier, sx.SampledClassifier]:
    """A head as it is and the same on the host."""
    torch.manual_seed(0)
    sampler = options.pop("sampler", None) or sx.samplers.LogUniform(C)
    classes = options.pop("class_weight", None)
    here = sx.SampledClassifier(D, C, sampler, options.pop("num_samples", M), class_weight=classes, **options)
    there = copy.deepcopy(here)
    there.host_table(compute=compute)
    return here, there


def batch(targets: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(B, D, generator=generator, requires_grad=True)
    return h, torch.randint(0, C, (B, targets) if targets else (B,), generator=generator)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "per row": ({}, {}),
    "shared": ({"shared": True}, {}),
    "sum, scale": ({"reduction": "sum", "scale": 2.0}, {}),
    "no reduction": ({"reduction": "none"}, {}),
    "no bias": ({"bias": False}, {}),
    "dense": ({"sparse": False}, {}),
    "negative sampling": ({"loss": "negative_sampling"}, {}),
    "nce": ({"loss": "nce"}, {}),
    "one vs each": ({"loss": "one_vs_each"}, {}),
    "class weight": ({"class_weight": torch.rand(C) + 0.5}, {}),
    "unigram": ({"sampler": sx.samplers.Unigram(torch.arange(1.0, C + 1))}, {}),
    "quadratic": ({"sampler": sx.samplers.Quadratic(torch.zeros(C, D)), "bias": False}, {}),
    "margin": (
        {"normalize": True, "scale": 8.0, "loss": sx.losses.SampledSoftmax(margin=sx.losses.ArcFace(0.3))},
        {},
    ),
    "learned scale": ({"normalize": True, "scale": 8.0, "learn_scale": True}, {}),
    "float64": ({"dtype": torch.float64}, {}),
    "unique": ({"shared": True, "unique": True}, {}),
    "full softmax": ({"loss": "full_softmax", "sampler": sx.samplers.Uniform(C)}, {}),
    "sample weight": ({}, {"sample_weight": torch.rand(B)}),
    "several targets": ({}, {"targets": 3}),
    "target weight": ({}, {"targets": 3, "target_weight": torch.rand(B, 3)}),
    "positives": ({}, {"positives": (torch.arange(B + 1) * 2, torch.arange(2 * B))}),
    "own": ({}, {"negatives": sx.Negatives(torch.arange(B * 4).view(B, 4), torch.full((B, 4), -3.0))}),
    "own, ragged": ({}, {"negatives": sx.Negatives((torch.arange(B + 1) * 3, torch.arange(B * 3)))}),
    "hard": ({}, {"hard": torch.arange(B * 4).view(B, 4)}),
    "ignored": ({"ignore_index": 5}, {"ignored": 5}),
}


@pytest.mark.parametrize(
    ("case", "compute"), [(case, "device") for case in CASES] + [("per row", "host"), ("hard", "host")]
)
def test_the_same_loss_and_gradients_as_on_one_device(far: Far, case: str, compute: str) -> None:
    options, call = CASES[case]
    here, there = pair(compute, **options)
    call = dict(call)
    h, y = batch(call.pop("targets", 0))
    if "ignored" in call:
        y[:3] = call.pop("ignored")
    h = h.detach().to(here.weight.dtype).requires_grad_()
    h2 = h.detach().clone().requires_grad_()
    for step in range(2):  # a sampler that follows the table has something to follow in the second
        wanted = here(h, y, key=sx.Key(3, step), **call)
        got = there(far.far(h2), y, key=sx.Key(3, step), **call)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        for head, loss in ((here, wanted), (there, got)):
            loss.sum().backward()
            torch.optim.SGD(list(head.parameters()), lr=0.1).step()
        assert h.grad is not None
        assert h2.grad is not None
        torch.testing.assert_close(h2.grad, h.grad, rtol=1e-5, atol=1e-6)
    for (name, p), q in zip(here.named_parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6, msg=name)
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and p.grad.is_sparse:
            assert q.grad.is_coalesced() == p.grad.is_coalesced(), name


@pytest.mark.parametrize("optimizer", [sx.optim.RowSGD, sx.optim.RowAdagrad, sx.optim.RowAdam])
@pytest.mark.parametrize("shared", [False, True])
def test_fused_updates_are_those_of_one_device(far: Far, optimizer: Any, shared: bool) -> None:
    here, there = pair(shared=shared)
    for head in (here, there):
        head.fuse_optimizer(optimizer(head.parameters(), lr=0.1))
    h, y = batch()
    for step in range(3):
        here(h, y, key=sx.Key(3, step)).backward()
        there(far.far(h.detach().clone().requires_grad_()), y, key=sx.Key(3, step)).backward()
    assert there.weight.grad is None
    torch.testing.assert_close(there.weight, here.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(there.bias, here.bias, rtol=1e-5, atol=1e-6)


def test_only_touched_rows_cross(far: Far) -> None:
    _, head = pair(shared=True)
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    h, y = batch()
    head(far.far(h), y).backward()
    assert far.moved
    rows = [t.shape[0] for t in far.moved if t.dim() == 2]
    assert 0 < max(rows) <= B + M  # h, rows and their gradients; never C
    assert max(t.numel() for t in far.moved) <= (B + M) * D


def test_draws_on_either_side(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    _, head = pair()
    drawn: list[tuple[Any, Any]] = []
    sample = head.sampler.sample
    monkeypatch.setattr(head.sampler, "sample", lambda h, *a, **k: drawn.append((h, k)) or sample(h, *a, **k))
    h, y = batch()
    head(far.far(h), y)
    assert any(drawn[0][0] is not t for t in far.moved)
    assert not getattr(drawn[0][0], "_far", False)  # a copy on the side of the sampler


@pytest.mark.parametrize("compute", ["device", "host"])
def test_exact_answers_come_back(far: Far, compute: str) -> None:
    here, there = pair(compute)
    here.eval(), there.eval()
    h, y = batch()
    h = h.detach()
    for found, wanted in (
        (there(far.far(h.clone()), y), here(h, y)),
        (there.topk(far.far(h.clone()), 5)[1], here.topk(h, 5)[1]),
        (there.log_prob(far.far(h.clone())), here.log_prob(h)),
        (there.scores(far.far(h.clone())), here.scores(h)),
        (there.predict(far.far(h.clone())), here.predict(h)),
    ):
        assert torch.equal(found, wanted)


def test_a_head_stays_on_the_host() -> None:
    _, head = pair()
    model = torch.nn.Sequential(torch.nn.Linear(4, D), head)
    model.to("meta")
    assert model[0].weight.is_meta
    assert head.weight.is_cpu
    assert head.bias.is_cpu
    before = head.weight.clone()
    head.to("meta", torch.float64)
    assert head.weight.dtype is torch.float64
    assert torch.equal(head.weight, before.double())


def test_refused_batches_change_nothing(far: Far) -> None:
    _, head = pair()
    head.fuse_optimizer(sx.optim.RowAdagrad(head.parameters(), lr=0.1))
    before = {name: t.clone() for name, t in head.state_dict().items()}
    h, y = batch()
    far.far(h)
    for call, error, words in (
        (lambda: head(h, torch.where(y == y[0], C, y)), IndexError, rf"y must be in \[0, {C}\)"),
        (lambda: head(h, y[:-1]), ValueError, "y must be"),
        (lambda: head(far.far(h[:, 1:].detach()), y), ValueError, "h must be"),
        (lambda: head(far.far(h.detach().double()), y), TypeError, "h must be torch.float32 like weight"),
        (lambda: head(h, y, negatives=sx.Negatives(torch.full((4,), C))), IndexError, r"negatives must be in \[0"),
        (lambda: head(h, y, target_weight=torch.rand(3)), ValueError, "target_weight must be"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert all(torch.equal(t, before[name]) for name, t in head.state_dict().items())


# ------------------------------------------------------------------------------------------------ files
def test_a_table_in_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wanted = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M)
    torch.manual_seed(0)
    head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M, device="meta")
    head.host_table(tmp_path / "rows.npy")
    assert torch.equal(head.weight, wanted.weight)  # the first rows of nn.Linear, though none was in memory before
    heads = wanted, head
    for each in heads:
        each.fuse_optimizer(sx.optim.RowAdam(each.parameters(), lr=0.1))
        h, y = batch()
        for step in range(3):
            each(h, y, key=sx.Key(1, step)).backward()
    assert torch.equal(head.weight, wanted.weight)
    stored = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert np.array_equal(stored, wanted.weight.detach().numpy())
    moments = np.load(tmp_path / "rows.npy.exp_avg_sq", mmap_mode="r")
    state = wanted.fused.optimizer.state[wanted.weight]
    assert np.array_equal(moments, state["exp_avg_sq"].numpy())
    with pytest.raises(TypeError, match=r"weight must stay torch\.float32, that of its file"):
        head.half()
    with pytest.raises(ValueError, match="must not be mapped from a file"):
        head.resize(C + 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_a_copy_of_a_table_in_a_file_is_in_memory(tmp_path: Path, copied: Any) -> None:
    """Its optimizer must not replace the files of the original's state."""
    head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M)
    head.host_table(tmp_path / "rows.npy")
    sx.optim.RowAdagrad(head.parameters(), initial_accumulator_value=0.5)
    state = tmp_path / "rows.npy.sum"
    before = state.stat().st_ino, state.read_bytes()
    other = copied(head)
    sx.optim.RowAdagrad(other.parameters(), initial_accumulator_value=0.25)
    assert (state.stat().st_ino, state.read_bytes()) == before
    assert torch.equal(other.weight, head.weight)
    with torch.no_grad():
        other.weight += 1.0
    assert not (np.load(tmp_path / "rows.npy") == other.weight.detach().numpy()).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_every_dtype_has_a_file(tmp_path: Path, dtype: torch.dtype) -> None:
    table = sx.tables.mapped_table(tmp_path / "t", 5, 3, dtype=dtype)
    assert table.dtype is dtype
    assert table.data_ptr() % 4096 == 0
    assert not table.any()
    table[2] = 1
    stored = np.load(tmp_path / "t", mmap_mode="r")
    assert stored.shape == (5, 3)
    assert stored.itemsize == dtype.itemsize
    assert stored.tobytes() == table.view(torch.uint8).numpy().tobytes()


def test_files_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), M)
    before = head.weight.detach().clone()
    for call, error, words in (
        (lambda: sx.tables.mapped_table(tmp_path / "there", 5, 3), FileExistsError, "file must be new"),
        (lambda: head.host_table(tmp_path / "there"), FileExistsError, "file must be new"),
        (lambda: head.host_table(tmp_path / "none" / "t"), OSError, "file must be one that can be made"),
        (lambda: sx.tables.mapped_table(tmp_path / "t", 0, 3), ValueError, "rows must be"),
        (lambda: sx.tables.mapped_table(tmp_path / "t", 5, 3, dtype=torch.int8), TypeError, "dtype must be one of"),
        (lambda: sx.tables.mapped_table(tmp_path / "t", 1 << 45, 1 << 10), OSError, "bytes"),
        (lambda: head.host_table(compute="gpu"), ValueError, "compute must be"),
        (lambda: head.host_table(7), TypeError, "file must be a path"),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=words):
            call()
    assert (tmp_path / "there").read_text() == "mine"
    assert not (tmp_path / "t").exists()
    assert head.host is None
    assert torch.equal(head.weight, before)
    head.fuse_optimizer(sx.optim.RowSGD(head.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="must not be fused yet"):
        head.host_table()


_TRAIN = """
    import os, sys, torch, samplex_cuda as sx
    folder, steps, kill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    C, D, B = 2000, 16, 32
    torch.manual_seed(0)
    head = sx.SampledClassifier(D, C, sx.samplers.Uniform(C), 20, device="meta")
    head.host_table(f"{folder}/rows-{os.getpid()}.npy")
    optimizer = sx.optim.RowAdam(head.parameters(), lr=0.1)
    head.fuse_optimizer(optimizer)
    first = 0
    if os.path.exists(f"{folder}/saved.pt"):
        saved = torch.load(f"{folder}/saved.pt", mmap=True)
        head.load_state_dict(saved["head"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, steps):
        if step == kill:
            os.kill(os.getpid(), 9)
        generator = torch.Generator().manual_seed(step)
        h, y = torch.randn(B, D, generator=generator), torch.randint(0, C, (B,), generator=generator)
        head(h, y, key=sx.Key(0, step)).backward()
        if step % 4 == 3:
            torch.save({"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                       f"{folder}/next.pt")
            os.replace(f"{folder}/next.pt", f"{folder}/saved.pt")
    torch.save(head.weight.detach().clone(), f"{folder}/end.pt")
"""


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def run(folder: Path, kill: int) -> int:
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(_TRAIN), str(folder), "12", str(kill)],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode

    assert run(tmp_path / "whole", -1) == 0
    assert run(tmp_path / "killed", 10) == -signal.SIGKILL
    assert run(tmp_path / "killed", -1) == 0
    ends = [torch.load(tmp_path / name / "end.pt") for name in ("whole", "killed")]
    assert torch.equal(*ends)


# ------------------------------------------------------------------------------------------------ a GPU
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("compute", ["device", "host"])
@pytest.mark.parametrize("side", ["cpu", "cuda"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_rows_cross_to_a_gpu(compute: str, side: str, fused: bool, shared: bool) -> None:
    here, there = pair(compute, shared=shared, sampler=sx.samplers.Unigram(torch.arange(1.0, C + 1)))
    there.to("cuda")
    there.sampler.to(side)
    assert there.weight.is_cpu
    optimizers = [sx.optim.RowAdagrad(head.parameters(), lr=0.1) for head in (here, there)]
    if fused:
        here.fuse_optimizer(optimizers[0]), there.fuse_optimizer(optimizers[1])
    h, y = batch()
    far_h, far_y = h.detach().cuda().requires_grad_(), y.cuda()
    negatives = sx.samplers.Uniform(C).sample(h, M, shared=shared, key=sx.Key(5))
    for _ in range(2):
        wanted = here(h, y, negatives=negatives)
        got = there(far_h, far_y, negatives=sx.Draw(negatives.ids.cuda(), negatives.log_q.cuda(), True))
        assert got.is_cuda
        assert there(far_h, far_y).isfinite()
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-6)
        wanted.backward(), got.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert h.grad is not None
    assert far_h.grad is not None
    assert far_h.grad.is_cuda
    torch.testing.assert_close(far_h.grad.cpu(), h.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(there.weight, here.weight, rtol=1e-5, atol=1e-6)
    assert there.eval().topk(far_h, 3)[1].is_cuda
