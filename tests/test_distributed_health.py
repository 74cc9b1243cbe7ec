"""Ranks that differ, and ranks that fall silent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from samplex_cuda.distributed import Heartbeat, attempt_store


def test_ranks_of_another_configuration_stop_everyone(ranks):
    for message in ranks.run(3, "disagree"):
        assert message.startswith("ValueError: agree: all ranks must have the same configuration")
        assert message.endswith("got lr = 0.1 on ranks 0, 1 and 0.2 on rank 2")


STOPPED = """
    import os, signal, sys, torch, torch.distributed as dist
    from datetime import timedelta
    from samplex_cuda.distributed import Heartbeat
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=4))
    with Heartbeat(interval=0.2, patience=2.0) as beat:
        for step in range(5):
            with beat.watch(f"step {step}"):
                if rank == 2 and step == 3:
                    os.kill(os.getpid(), signal.SIGSTOP)
                dist.all_reduce(torch.ones(3))
"""


def test_a_stopped_rank_is_named(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(STOPPED))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(3):
        with (tmp_path / f"{rank}.err").open("w") as file:
            command = [sys.executable, str(script), str(rank), str(port)]
            started.append(subprocess.Popen(command, stderr=file, env=os.environ))
    try:
        started[1].wait(timeout=90)
        text = (tmp_path / "1.err").read_text()
        assert "rank 2, which last said 'step 3'" in text
        assert started[1].returncode == 1
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.slow
def test_a_stopped_rank_of_a_run_is_named_by_the_others(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    script, world, victim, step = Path(__file__).parent / "rank_stop.py", 3, 1, 4
    started = []
    for rank in range(world):
        with (tmp_path / f"{rank}.err").open("w") as file:
            command = [sys.executable, str(script), str(rank), str(world), str(store.port),
                       str(tmp_path / "run"), str(victim), str(step)]  # fmt: skip
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file))
    try:
        for rank in (0, 2):
            started[rank].wait(timeout=120)
            text = (tmp_path / f"{rank}.err").read_text()
            assert started[rank].returncode == 1, text[-4000:]
            assert "no sign of life for 2.5 s from rank 1, which last said 'step 3'" in text, text[-4000:]
            assert "from rank 0" not in text
            assert "from rank 2" not in text
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_rank_that_lives_is_not_silent():
    store = dist.HashStore()
    with (
        Heartbeat(store, 0, 2, interval=0.05, patience=1.0) as one,
        Heartbeat(store, 1, 2, interval=0.05, patience=1.0),
    ):
        begin = time.monotonic()
        assert one.silent() == []
        assert time.monotonic() - begin < 0.9  # it does not wait longer than it needs


ASLEEP = """
    import sys, time, torch, torch.distributed as dist
    from datetime import timedelta
    from samplex_cuda.distributed import Heartbeat
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=4))
    with Heartbeat(interval=0.2, patience=2.0) as beat:
        for step in range(5):
            if rank == 2 and step == 3:
                beat.doing("reading data")
                time.sleep(600)  # the main thread hangs; that of the heartbeat does not
            with beat.watch(f"step {step}"):
                dist.all_reduce(torch.ones(3))
"""


def test_a_rank_that_hangs_while_its_heartbeat_runs_is_named(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(ASLEEP))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(3):
        with (tmp_path / f"{rank}.err").open("w") as file:
            started.append(subprocess.Popen([sys.executable, str(script), str(rank), str(port)], stderr=file))
    try:
        started[1].wait(timeout=90)
        text = (tmp_path / "1.err").read_text()
        assert started[1].returncode == 1
        assert "every rank is alive, but in 'step 3' this one waited for" in text
        assert "rank 2 says 'reading data'" in text
        assert "no sign of life" not in text
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_behind_are_those_that_do_something_else():
    store = dist.HashStore()
    with (
        Heartbeat(store, 0, 4, interval=0.05, patience=0.2) as one,
        Heartbeat(store, 1, 4, interval=0.05, patience=0.2) as two,
        Heartbeat(store, 2, 4, interval=0.05, patience=0.2) as three,
    ):
        one.doing("step 7"), two.doing("step 7"), three.doing("step 6")
        assert one.behind() == [(2, "step 6"), (3, "has not started")]
        assert three.behind() == [(0, "step 7"), (1, "step 7"), (3, "has not started")]


def test_other_errors_pass():
    store = dist.HashStore()
    with (
        Heartbeat(store, 0, 2, interval=0.05, patience=0.2) as beat,
        pytest.raises(RuntimeError, match="my own"),
        beat.watch("step 1"),
    ):
        raise RuntimeError("my own")


def test_an_attempt_does_not_see_the_one_before():
    store = dist.HashStore()
    attempt_store(store, 0).set("address", "a")
    assert not attempt_store(store, 1).check(["address"])
    assert attempt_store(store, 0).get("address") == b"a"


# The main thread keeps the GIL from the last collective to its end: a thread of gloo that wants it is surely late.
LATE = """
    import sys, torch, torch.distributed as dist
    import samplex_cuda.distributed
    rank, path = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    group = dist.group.WORLD  # as DDP and sharded heads keep it
    sys.setswitchinterval(60)
    for _ in range(50):
        mine, found = torch.ones(4), [torch.empty(4), torch.empty(4)]
        dist.all_gather(found, mine)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("attempt", range(3))
def test_a_process_ends_after_the_threads_of_gloo(tmp_path, attempt):
    script = tmp_path / "late.py"
    script.write_text(textwrap.dedent(LATE))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
