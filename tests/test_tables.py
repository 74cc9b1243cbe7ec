"""Tables that forked processes do not slow down: what parent and child see, page faults, memory, identity."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import _native
from samplex_cuda.tables import empty_table, share

linux = pytest.mark.skipif(sys.platform != "linux", reason="shared tables are for Linux")

ROWS, WIDTH = 100_000, 128  # 51 MB
PAGE = resource.getpagesize()


def table(rows: int = ROWS, width: int = WIDTH, *, shared: bool = False) -> torch.Tensor:
    found = empty_table(rows, width, shared=shared)
    return found.copy_(torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, width))


def in_child(check: Callable[[], bool]) -> bool:
    """Whether `check` holds in a forked process; it must not use the threads of torch, which a fork loses."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), f"the child ended with {code}"
    return code == 0


class Child:
    """A forked process that stays until it is ended, as a worker of a DataLoader does."""

    def __enter__(self) -> Child:
        self.read, write = os.pipe()
        self.stay, self.end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.end)
            os.write(write, b"x")
            os.read(self.stay, 1)
            os._exit(0)
        os.close(write)
        os.close(self.stay)
        os.read(self.read, 1)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.end)
        os.close(self.read)
        os.waitpid(self.pid, 0)


def faults_of(work: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    """Bytes of this process in memory of its own and in shared memory."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------------------------------------------ tables
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 1000, 300_000])
def test_a_table_is_as_torch_makes_it(rows, dtype):
    found = empty_table(rows, 64, dtype=dtype)
    assert found.shape == (rows, 64)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert found.data_ptr() % 128 == 0
    found.fill_(2)
    assert bool((found == 2).all())


def test_a_table_on_another_device_or_fake_is_plain():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert empty_table(ROWS, WIDTH, device="meta").is_meta
    with FakeTensorMode():
        assert empty_table(ROWS, WIDTH).shape == (ROWS, WIDTH)


@linux
def test_memory_goes_with_the_last_tensor():
    gc.collect()  # what other tests have left in cycles
    before = resident()
    files = descriptors()
    first = table()
    view = first[10:20]
    assert share(first) >= first.nbytes
    assert descriptors() == files + 1
    assert resident() - before > 0.9 * first.nbytes
    del first
    gc.collect()
    assert view[:, 0].tolist() == list(range(10, 20))  # a view keeps all of it
    del view
    gc.collect()
    assert resident() - before < 0.2 * ROWS * WIDTH * 4
    assert descriptors() == files


@linux
def test_a_large_table_is_shared_by_default_if_there_are_huge_pages_for_it():
    """Where there are none, it stays on private huge pages, and sharing is the caller's choice."""
    first = table(shared=True)
    found = _native.table_shared_bytes(first.data_ptr())
    assert found == 0 or found >= first.nbytes
    if found > 0:
        rows = first.numpy()
        assert in_child(lambda: bool((rows[:, 0] == range(ROWS)).all()))
        with Child():
            assert faults_of(lambda: first.mul_(2)) < 100  # of 12,500 small pages
    assert _native.table_shared_bytes(table(100, 4).untyped_storage().data_ptr()) == 0


@linux
def test_the_environment_keeps_tables_private(monkeypatch):
    monkeypatch.setenv("SAMPLEX_TABLES", "private")
    assert _native.table_shared_bytes(table(shared=True).data_ptr()) == 0


@linux
def test_sharing_does_not_double_memory():
    first = table()
    gc.collect()
    before = resident()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    share(first)
    assert abs(resident() - before) < 0.1 * first.nbytes
    # At most one part of 32 MiB was there twice.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak <= (40 << 10)


# ------------------------------------------------------------------------------------------------ forks
@linux
def test_a_child_reads_the_right_rows_and_keeps_its_writes():
    first = table()
    share(first)
    rows = first.numpy()

    def check() -> bool:
        right = bool((rows[:, 0] == range(ROWS)).all() and (rows[:, -1] == range(ROWS)).all())
        rows[:] = -1.0
        return right and bool((rows == -1.0).all())

    assert in_child(check)
    assert torch.equal(first, table())


@linux
def test_a_child_sees_what_the_parent_writes_later():
    first = table()
    share(first)
    rows = first.numpy()
    go, ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go, 1)
        os._exit(0 if rows[77, 3] == 5.0 else 1)
    first[77] = 5.0
    os.write(ready, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(go)
    os.close(ready)


@linux
def test_a_child_may_free_its_table():
    first = table()
    share(first)
    address = first.data_ptr()
    before = descriptors()

    def check() -> bool:
        nonlocal first
        del first
        gc.collect()
        return _native.table_shared_bytes(address) == 0 and descriptors() < before

    assert in_child(check)
    assert torch.equal(first, table())


@linux
def test_a_child_of_a_child_has_its_own_table():
    first = table()
    share(first)
    rows = first.numpy()

    def grandchild() -> bool:
        right = rows[5, 0] == 6.0
        rows[5] = 7.0
        return bool(right)

    def check() -> bool:
        rows[5] = 6.0
        return in_child(grandchild) and bool(rows[5, 0] == 6.0)

    assert in_child(check)
    assert first[5, 0] == 5.0


@linux
def test_a_child_can_share_its_table_again():
    first = table()
    share(first)
    rows = first.numpy()

    def check() -> bool:
        rows[5] = 6.0
        again = _native.share_table(first.data_ptr())
        return again >= first.nbytes and rows[5, 0] == 6.0 and rows[6, 0] == 6.0 and rows[-1, 0] == ROWS - 1

    assert in_child(check)
    assert first[5, 0] == 5.0


@linux
def test_closed_descriptors_are_noticed():
    """A program that closed all files, and opened another under the number, keeps both the file and the table."""
    code = """
import os, torch
from samplex_cuda.tables import empty_table, share
t = empty_table(100_000, 128).fill_(3.0)
share(t)
top = max(int(n) for n in os.listdir("/proc/self/fd"))
os.closerange(3, top + 1)
other = os.open("/dev/null", os.O_RDONLY)
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(top)]
child = os.fork()
if child == 0:
    os._exit(0 if (t.numpy() == 3.0).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (t == 3.0).all()
del t
for file in [other, *files]:
    os.fstat(file)
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr


@linux
def test_writes_beside_a_child_take_no_page_faults():
    rows = torch.randperm(ROWS)[:4000]
    value = torch.ones(4000, WIDTH)
    private, shared = table(), table()
    assert _native.table_shared_bytes(private.data_ptr()) == 0
    share(shared)
    shared.index_copy_(0, rows, value)
    with Child():
        assert faults_of(lambda: shared.index_copy_(0, rows, value)) < 50
        assert faults_of(lambda: private.index_copy_(0, rows, value)) > 1000  # what sharing is for


@linux
def test_a_fused_step_beside_a_child_takes_few_page_faults():
    classes, dim, batch = 200_000, 64, 128
    head = sx.SampledClassifier(dim, classes, sx.samplers.Uniform(classes), num_samples=64)
    optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1)
    head.fuse_optimizer(optimizer)
    weight, total = head.weight, optimizer.state[head.weight]["sum"]
    assert share(head, optimizer) >= 2 * head.weight.nbytes

    def steps(count: int) -> None:
        for _ in range(count):
            h = torch.randn(batch, dim, requires_grad=True)
            head(h, torch.randint(classes, (batch,))).backward()

    steps(5)
    with Child():
        steps(20)  # small buffers are copied once
        assert faults_of(lambda: steps(10)) <= 200
    assert head.weight is weight
    assert optimizer.state[weight]["sum"] is total


# ------------------------------------------------------------------------------------------------ identity
@linux
def test_sharing_keeps_values_identity_and_views():
    foreign = torch.arange(4_000_000, dtype=torch.float32).view(-1, 4)
    for first in (table(), table(shared=True), foreign):
        want = first.clone()
        parameter = torch.nn.Parameter(first)
        module = torch.nn.Module()
        module.weight = parameter
        module.register_buffer("tied", parameter.detach()[1:])
        assert share(module) >= parameter.nbytes
        assert module.weight is parameter
        assert torch.equal(parameter.detach(), want)
        assert _native.table_shared_bytes(parameter.untyped_storage().data_ptr()) >= parameter.nbytes
        with torch.no_grad():
            parameter[1] = -4.0
        assert (module.tied[0] == -4.0).all()
        assert share(module) >= parameter.nbytes  # again does nothing


@linux
def test_copies_and_files_are_plain():
    head = sx.SampledClassifier(128, ROWS, sx.samplers.Uniform(ROWS), num_samples=4)
    share(head)
    twin = copy.deepcopy(head)
    assert torch.equal(twin.weight, head.weight)
    assert twin.weight.data_ptr() != head.weight.data_ptr()
    back = pickle.loads(pickle.dumps(head.weight.detach()))
    assert torch.equal(back, head.weight)
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    assert file.tell() < 1.1 * sum(p.nbytes for p in head.parameters())
    file.seek(0)
    address = head.weight.data_ptr()
    with torch.no_grad():
        head.weight.zero_()
    head.load_state_dict(torch.load(file))
    assert torch.equal(head.weight, twin.weight)
    assert head.weight.data_ptr() == address
    half = head.to(torch.bfloat16)
    assert half.weight.dtype == torch.bfloat16


def test_sharing_leaves_small_and_foreign_tensors_alone():
    small = torch.zeros(1000)
    address = small.data_ptr()
    assert share(small, torch.zeros(ROWS, WIDTH, device="meta"), torch.eye(3).to_sparse()) == 0
    assert small.data_ptr() == address


def test_an_owner_must_own_tensors():
    with pytest.raises(TypeError, match="share: an owner must be a module, an optimizer or a tensor, got str"):
        share("head")


@linux
def test_without_descriptors_a_table_stays_private():
    code = """
import resource, torch
from samplex_cuda.tables import empty_table, share
t = empty_table(100_000, 128, shared=False).fill_(3.0)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
assert share(t) == 0
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
assert (t == 3.0).all()
assert share(t) >= t.nbytes
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize(("rows", "width"), [(0, 3), (3, 0), (1, 1), (50, 8), (1000, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_table_is_the_whole_of_its_storage(rows, width, dtype):
    """safetensors refuses a tensor that is a part of a larger storage."""
    table = empty_table(rows, width, dtype=dtype)
    assert table.untyped_storage().nbytes() == table.nbytes
    assert table.storage_offset() == 0
    assert table.data_ptr() % 128 == 0
