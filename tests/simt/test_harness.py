"""The harness must see what it is there to see: runs the kernels of selftest_*.cu, most of them wrong on purpose."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from samplex_cuda import _native

pytestmark = pytest.mark.skipif(
    not _native.build_info()["test_backends"], reason="needs a build with SAMPLEX_TEST_BACKENDS=ON"
)
THREADS = 128
SCHEDULES = ("fair", "greedy", "reversed")


@pytest.fixture(scope="module")
def library():
    lib = ctypes.CDLL(str(Path(_native.__file__).parent / "libsamplex.so"))
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    lib.sx_simt_selftest.argtypes = [
        ctypes.c_char_p,
        pointer,
        int64,
        pointer,
        int64,
        int64,
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    return lib


@pytest.fixture
def run(library, monkeypatch):
    """run(name, in, out, arg, schedules) -> None, or the text the harness threw."""

    def call(name: str, source, target, arg: int = 0, schedules: str = "all") -> str | None:
        monkeypatch.setenv("SX_SIMT_SCHEDULES", schedules)
        error = ctypes.create_string_buffer(4096)
        code = library.sx_simt_selftest(
            name.encode(), source.ctypes.data, source.size, target.ctypes.data, target.size, arg, error, len(error)
        )
        assert code in (0, 1), f"no self-test is called {name}"
        return error.value.decode() if code else None

    return call


@pytest.fixture
def checked(library):
    if not library.sx_simt_checked():
        pytest.skip("AddressSanitizer checks the accesses of this build, and ends the process")


@pytest.fixture
def checked_types(library):
    if not library.sx_simt_checks_types():
        pytest.skip("UBSan checks these accesses in this build, and ends the process")


def numbers(n: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(n).astype(np.float32)


def filled(n: int) -> np.ndarray:
    return np.full(n, np.nan, np.float32)


# ---------------------------------------------------------------------------------------------------- schedules
@pytest.mark.parametrize("name", ["reduce", "block_sum"])
def test_correct_reduction_gives_equal_bits(run, name):
    x = numbers(4 * THREADS)
    each = []
    for schedules in (*SCHEDULES, "all"):
        out = filled(x.size)
        assert run(name, x, out, schedules=schedules) is None
        each.append(out)
    for other in each[1:]:
        np.testing.assert_array_equal(each[0].view(np.uint32), other.view(np.uint32))
    factor = 3 if name == "reduce" else 1  # the kernel adds its sum and twice its sum
    wanted = factor * x.reshape(4, THREADS).astype(np.float64).sum(1)
    bound = factor * np.abs(x).sum() * 2.0**-23 * 8
    assert np.abs(each[0].reshape(4, THREADS) - wanted[:, None]).max() < bound


@pytest.mark.parametrize("which", ["first", "second"])
def test_deleted_barrier_is_caught(run, which):
    x = numbers(4 * THREADS)
    error = run(f"reduce_without_{which}_barrier", x, filled(x.size))
    assert error is not None
    assert re.search(
        r"^selftest_reduce: simt: kernel reduce_kernel<kFirst, kSecond>: the schedules fair and (greedy|reversed) "
        r"leave different bits in noted buffer 1 \(output, 2048 bytes\): first at byte \d+, \d+ bytes differ",
        error,
    ), error


def test_greedy_order_alone_shows_the_deleted_barrier(run):
    x = numbers(THREADS)
    right, wrong = filled(x.size), filled(x.size)
    assert run("reduce", x, right, schedules="greedy") is None
    assert run("reduce_without_first_barrier", x, wrong, schedules="greedy") is None
    assert (right != wrong).any()


def test_missing_syncwarp_is_caught(run):
    x = numbers(THREADS)
    out = filled(THREADS)
    assert run("neighbour", x, out) is None
    np.testing.assert_array_equal(out, x.reshape(-1, 2)[:, ::-1].reshape(-1))
    error = run("neighbour_without_syncwarp", x, filled(THREADS))
    assert error is not None
    assert "the schedules fair and reversed leave different bits" in error


@pytest.mark.parametrize("who", [0, 37, THREADS - 1, THREADS])
def test_an_answer_of_any_thread_reaches_all_and_is_forgotten(run, who):
    out = filled(THREADS)
    assert run("any_thread", numbers(1), out, arg=who) is None
    assert (out == (5 if who < THREADS else 0)).all()


def test_integer_atomics(run):
    out = np.zeros(8 + THREADS, np.float32)
    assert run("atomics", numbers(1), out) is None
    counts = out.view(np.int32)
    assert counts[:6].tolist() == [3 * THREADS // 4] * 4 + [3 * THREADS - 1, 77]
    assert out[6:8].view(np.uint64)[0] == 3 * THREADS << 32


def test_result_that_depends_on_the_order_is_caught(run):
    error = run("atomics", numbers(1), np.zeros(8 + THREADS, np.float32), arg=1)
    assert error is not None
    assert "the schedules fair and reversed leave different bits" in error
    assert "first at byte 32" in error


@pytest.mark.parametrize("schedules", SCHEDULES)
def test_each_schedule_can_be_chosen(run, schedules):
    out = filled(THREADS)
    assert run("atomics", numbers(1), np.zeros(8 + THREADS, np.float32), arg=1, schedules=schedules) is None
    error = run("early_return", numbers(THREADS), out, arg=3, schedules=schedules)
    assert error is not None
    assert f"schedule {schedules}" in error


def test_unknown_schedule_is_refused(run):
    error = run("indices", numbers(1), filled(12 * 32), schedules="random")
    assert error == "selftest_indices: SX_SIMT_SCHEDULES must be fair, greedy, reversed or all, got 'random'"


# ---------------------------------------------------------------------------------------------------- barriers
def test_barrier_after_early_return_is_reported(run):
    error = run("early_return", numbers(THREADS), filled(THREADS), arg=100)
    assert error is not None
    assert error.startswith("selftest_early_return: simt: kernel early_return_kernel, schedule fair, block (0, 0, 0)")
    assert re.search(r"thread \(0, 0, 0\): waits at __syncthreads \(tests/simt/selftest_barriers\.cu:\d+ in ", error)
    assert "which thread (100, 0, 0) never reaches: it has returned" in error
    assert run("early_return", numbers(THREADS), filled(THREADS), arg=THREADS) is None


def test_barriers_of_different_places_are_reported(run):
    error = run("two_barriers", numbers(THREADS), filled(THREADS))
    assert error is not None
    lines = re.findall(r"__syncthreads \(tests/simt/selftest_barriers\.cu:(\d+)", error)
    assert len(set(lines)) == 2
    assert "which thread (32, 0, 0) never reaches: it waits at __syncthreads" in error


def test_shuffle_not_reached_by_all_lanes_is_reported(run):
    error = run("partial_shuffle", numbers(THREADS), filled(THREADS), arg=20)
    assert error is not None
    assert re.search(
        r"thread \(0, 0, 0\): waits at __shfl_xor_sync \(csrc/common/warp\.cuh:\d+ in .*mask 0xffffffff", error
    )
    assert "which lane 20 never reaches: thread (20, 0, 0) has returned" in error
    assert run("partial_shuffle", numbers(THREADS), filled(THREADS), arg=32) is None


def test_lane_at_a_barrier_instead_of_the_shuffle_is_reported(run):
    error = run("shuffle_or_barrier", numbers(THREADS), filled(THREADS))
    assert error is not None
    assert "which lane 3 never reaches: thread (3, 0, 0) waits at __syncthreads" in error


def test_full_mask_in_a_ragged_warp_is_reported(run):
    error = run("ragged_block", numbers(THREADS), filled(THREADS), arg=32)
    assert error is not None
    assert "which lane 8 never reaches: the block has only 40 threads" in error


def test_collectives_of_32_and_64_bits(run):
    out = filled(THREADS)
    assert run("collectives", np.ones(1, np.float32), out) is None
    np.testing.assert_array_equal(out, np.zeros(THREADS))


def test_indices(run):
    out = filled(12 * 32)
    assert run("indices", numbers(1), out) is None
    np.testing.assert_array_equal(out.reshape(12, 32), 1000 * np.arange(12)[:, None] + np.arange(32))


# ---------------------------------------------------------------------------------------------------- errors
def test_trap_carries_what_was_printed(run):
    error = run("trap", numbers(1), filled(1), arg=70)
    assert error is not None
    assert "thread (70, 0, 0): __trap (" in error
    assert error.endswith(": selftest_trap: id 12 is out of range")


def test_exception_inside_a_fiber(run):
    error = run("throw", numbers(1), filled(1), arg=70)
    assert error is not None
    assert error.endswith("thread (70, 0, 0): exception: thrown inside a fiber")


def test_launch_limits(run):
    assert run("limits", numbers(1), filled(1), arg=1024) is None
    error = run("limits", numbers(1), filled(1), arg=1025)
    assert error == ("selftest_limits: launch exceeds the limits: grid 1x1x1, threads 1025, dynamic shared memory 0")


def test_the_harness_works_on_after_errors_and_on_other_threads(run):
    x = numbers(THREADS)
    for _ in range(3):
        assert run("early_return", x, filled(THREADS), arg=1) is not None
        assert run("throw", x, filled(THREADS), arg=0) is not None
        assert run("collectives", np.ones(1, np.float32), filled(THREADS)) is None
    outs = [filled(THREADS) for _ in range(3)]
    threads = [threading.Thread(target=run, args=("reduce", x, out)) for out in outs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    here = filled(THREADS)
    assert run("reduce", x, here) is None
    for out in outs:
        np.testing.assert_array_equal(out, here)


# ---------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize(
    ("name", "arg", "wanted"),
    [
        ("read", 40, r"load of 4 bytes at 0x[0-9a-f]+ is out of bounds: it starts 0 bytes past the end of noted "
                     r"buffer 0 \(input, 160 bytes\)"),
        ("read", 43, r"it starts 12 bytes past the end of noted buffer 0"),
        ("read", -2, r"it starts 8 bytes before noted buffer 0"),
        ("write", 32, r"store of 4 bytes at 0x[0-9a-f]+ is out of bounds: it starts 0 bytes past the end of noted "
                      r"buffer 1 \(output, 128 bytes\)"),
        ("write_input", 7, r"writes to noted buffer 0 \(input, 160 bytes\) at byte 28"),
    ],
)  # fmt: skip
def test_global_memory_out_of_bounds_is_reported(run, checked, name, arg, wanted):
    # Both lie well inside larger arrays, so that a missed check does no harm and no other buffer is near.
    source, target = numbers(4096)[1000:1040], filled(4096)[1000:1032]
    before = source.copy()
    error = run(name, source, target, arg)
    assert error is not None
    assert error.startswith(
        f"selftest_{name}: simt: kernel {name}_kernel, schedule fair, block (0, 0, 0), thread (5, 0, 0): "
    )
    assert re.search(wanted, error), error
    np.testing.assert_array_equal(source, before)


def test_the_last_element_is_in_bounds(run):
    source, target = numbers(40), filled(32)
    assert run("read", source, target, arg=39) is None
    assert target[5] == source[39]
    assert run("write", source, target, arg=31, schedules="fair") is None


@pytest.mark.parametrize(("name", "verb"), [("dynamic_smem_read", "load"), ("dynamic_smem_write", "store")])
def test_dynamic_shared_memory_out_of_bounds_is_reported(run, checked, name, verb):
    assert run(name, numbers(32), filled(32), arg=63, schedules="fair") is None
    for index, text in [
        (64, r"it starts 0 bytes past the end of dynamic shared memory \(256 bytes\)"),
        (-1, r"it starts 4 bytes before dynamic shared memory"),
    ]:
        error = run(name, numbers(32), filled(32), arg=index)
        assert error is not None
        assert re.search(rf"thread \(5, 0, 0\): {verb} of 4 bytes at 0x[0-9a-f]+ is out of bounds: {text}", error), (
            error
        )


def test_static_shared_memory_out_of_bounds_is_reported(run, checked_types):
    error = run("static_smem", numbers(32), filled(32), arg=64)
    assert error is not None
    assert re.search(
        r"thread \(5, 0, 0\): tests/simt/selftest_memory\.cu:\d+: index 64 is out of bounds of 'float \[64\]'", error
    ), error


def test_misaligned_vector_load_is_reported(run, checked_types):
    memory = np.zeros(256, np.float32)
    start = (-memory.ctypes.data // 4) % 4  # first element on a 16-byte boundary
    source, target = memory[start : start + 68], memory[start + 128 : start + 192]
    source[:] = np.arange(68)
    assert run("vector", source, target) is None
    np.testing.assert_array_equal(target, np.arange(64))
    error = run("vector", source, target, arg=1)
    assert error is not None
    assert re.search(r"misaligned access: '(const )?(struct )?float4' at 0x[0-9a-f]+ wants alignment 16", error), error


def test_vector_load_over_the_end_is_reported(run, checked):
    memory = np.zeros(256, np.float32)
    start = (-memory.ctypes.data // 4) % 4
    source, target = memory[start : start + 30], memory[start + 128 : start + 160]
    error = run("vector", source, target)
    assert error is not None
    assert "thread (7, 0, 0): load of" in error
    assert "noted buffer 0 (input, 120 bytes)" in error


def test_another_threads_stack_is_out_of_bounds(run, checked):
    error = run("other_stack", numbers(32), filled(32))
    assert error is not None
    assert "thread (1, 0, 0): load of 4 bytes at" in error


def test_params_constants_and_locals_are_in_bounds(run):
    out = filled(32)
    assert run("by_value", numbers(32), out, arg=10) is None
    wanted = [sum((i * 7 + t) % 64 + i % 4 + 0.5 for i in range(10)) for t in range(32)]
    np.testing.assert_array_equal(out, np.array(wanted, np.float32))


def test_shared_memory_is_poisoned_at_block_start(run):
    out = filled(2 * 3 * 64)
    assert run("uninitialised", numbers(1), out) is None
    np.testing.assert_array_equal(out.view(np.uint32), np.full(out.size, 0xCDCDCDCD, np.uint32))


# ---------------------------------------------------------------------------------------------------- speed
def test_thousands_of_blocks(run):
    blocks = 2000
    x = numbers(blocks * THREADS)
    out = filled(x.size)
    start = time.perf_counter()
    assert run("block_sum", x, out) is None
    seconds = time.perf_counter() - start
    print(f"simt: {3 * blocks / seconds:.0f} blocks/s of {THREADS} threads, 5 shuffles and 2 barriers each")
    wanted = x.reshape(blocks, THREADS).astype(np.float64).sum(1)
    np.testing.assert_array_equal(out.reshape(blocks, THREADS)[:, 0], wanted.astype(np.float32))
