"""Loops of the CPU kernels: the OpenMP team, the workers for crowded machines, and the choice between the two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import samplex_cuda as sx
from samplex_cuda import _native

pytestmark = pytest.mark.skipif(
    os.environ.get("SAMPLEX_CPU_BACKEND", "cpu") != "cpu", reason="loops of the CPU kernels only"
)


@pytest.fixture(autouse=True)
def _restore():
    mode, threads = _native.thread_mode(), torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    _native.set_thread_mode(mode)
    torch.set_num_threads(threads)


@pytest.fixture(params=["openmp", "pool", "auto"])
def mode(request):
    _native.set_thread_mode(request.param)
    return request.param


def counted(name: str) -> int:
    return _native.thread_counts()[name]


# ------------------------------------------------------------------------------------------------ loops
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_item_is_visited_once(mode, shared, nested, threads):
    torch.set_num_threads(threads)
    for n in (0, 1, 2, 7, 1000, 12_345):
        for grain in (1, 3, 999):
            assert _native.run_loop(n, grain, shared=shared, nested=nested) == [1] * n


def test_many_short_loops(mode):
    for n in range(2, 600):
        assert _native.run_loop(n) == [1] * n


def test_the_mode_decides_who_runs_a_loop():
    for mode in ("openmp", "pool"):
        _native.set_thread_mode(mode)
        before = counted(mode)
        _native.run_loop(100)
        assert counted(mode) == before + 1


@pytest.mark.parametrize("shared", [False, True])
def test_an_exception_reaches_the_caller(mode, shared):
    for at in (0, 499, 999):
        with pytest.raises(RuntimeError, match="this call throws"):
            _native.run_loop(1000, shared=shared, throw_at=at)
        assert _native.run_loop(1000, shared=shared) == [1] * 1000


def test_threads_of_python_do_not_wait_for_each_other(mode):
    wrong = []

    def work():
        for n in range(2, 300):
            if _native.run_loop(n, nested=n % 2 == 0) != [1] * n:
                wrong.append(n)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads)
    assert not wrong


def test_a_second_caller_runs_beside_the_first():
    _native.set_thread_mode("pool")
    _native.run_loop(2)  # the workers are there
    long = threading.Thread(target=lambda: _native.run_loop(2, sleep_at=0, microseconds=3_000_000), daemon=True)
    long.start()
    time.sleep(0.2)
    before = counted("openmp")
    assert _native.run_loop(1000) == [1] * 1000
    assert long.is_alive()
    assert counted("openmp") == before + 1
    long.join(60)


# ------------------------------------------------------------------------------------------------ crowding
def test_a_late_thread_moves_loops_to_the_workers_and_quiet_brings_them_back():
    _native.set_thread_mode("auto")
    late = counted("late")
    # Asleep is what a descheduled thread looks like: the clock runs on, its CPU time does not.
    pool = counted("pool")
    _native.run_loop(100, sleep_at=99, microseconds=5_000)
    _native.run_loop(100)
    assert counted("late") >= late + 1
    if counted("late") == late + 1:  # no other process made a second thread late
        assert counted("pool") == pool  # one may be an accident
    for _ in range(20):  # on a busy machine the second may come too late, or the pause be over
        _native.run_loop(100, sleep_at=99, microseconds=5_000)
        pool = counted("pool")
        _native.run_loop(100)
        if counted("pool") == pool + 1:
            break
    assert counted("pool") == pool + 1
    deadline = time.monotonic() + 30
    openmp = counted("openmp")
    while counted("openmp") == openmp and time.monotonic() < deadline:
        _native.run_loop(100)
        time.sleep(0.001)
    assert counted("openmp") > openmp


def test_a_long_body_is_not_taken_for_a_late_thread():
    """Work is not waiting. Many attempts: on a crowded machine a thread is really late in most."""
    torch.set_num_threads(2)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        _native.set_thread_mode("auto")  # forgets what was noticed before
        late = counted("late")
        _native.run_loop(100, spin_at=99, microseconds=1000)
        if counted("late") == late:
            return
    pytest.fail("every loop counts as late")


# ------------------------------------------------------------------------------------------------ results
def trained(mode: str, threads: int) -> list[torch.Tensor]:
    _native.set_thread_mode(mode)
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    classes, dim, batch = 30_000, 64, 256
    head = sx.SampledClassifier(dim, classes, sx.samplers.LogUniform(classes), num_samples=64)
    optimizer = sx.optim.RowAdagrad(head.parameters(), lr=0.1)
    head.fuse_optimizer(optimizer)
    losses = []
    for step in range(4):
        h = torch.randn(batch, dim, requires_grad=True)
        loss = head(h, torch.randint(classes, (batch,)), key=sx.Key(5, step))
        loss.backward()
        losses += [loss.detach(), h.grad]
    return [*losses, head.weight.detach(), head.bias.detach(), optimizer.state[head.weight]["sum"]]


@pytest.mark.parametrize("threads", [2, 5])
def test_training_has_the_same_bits_in_each_mode(threads):
    before = counted("pool")
    by_pool = trained("pool", threads)
    assert counted("pool") > before
    for ours, theirs in zip(by_pool, trained("openmp", threads), strict=True):
        assert torch.equal(ours, theirs)


# ------------------------------------------------------------------------------------------------ forks, settings
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_runs_loops(mode):
    _native.run_loop(1000)  # the parent has a team, and in pool mode workers
    child = os.fork()
    if child == 0:
        try:
            torch_free = [_native.run_loop(1000, shared=shared) == [1] * 1000 for shared in (False, True)]
            os._exit(0 if all(torch_free) else 3)
        finally:
            os._exit(4)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    assert _native.run_loop(1000) == [1] * 1000  # and the parent goes on


def in_process(code: str, threads: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SAMPLEX_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"SAMPLEX_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name", ["auto", "openmp", "pool"])
def test_the_environment_chooses_the_mode(name):
    code = (
        "import torch; from samplex_cuda import _native; torch.set_num_threads(2); "
        "_native.run_loop(1000); print(_native.thread_mode(), _native.thread_counts()['pool'])"
    )
    found = in_process(code, name)
    assert found.stdout.split() == [name, "1" if name == "pool" else "0"], found.stderr
    assert found.returncode == 0  # with workers asleep


def test_a_wrong_mode_is_an_error():
    with pytest.raises(ValueError, match="must be auto, openmp or pool, got many"):
        _native.set_thread_mode("many")
    found = in_process("from samplex_cuda import _native; _native.thread_mode()", "many")
    assert "SAMPLEX_THREADS must be auto, openmp or pool, got many" in found.stderr
