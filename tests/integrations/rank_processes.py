"""Starts a test file as several processes, as torchrun does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_ranks(file: str, folder: Path, world: int = 2) -> None:
    """Runs `python file folder` once per rank, on gloo; fails if one of them does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(file).parent),
        }  # fmt: skip
        with (folder / f"output{rank}.txt").open("w") as output:
            command = [sys.executable, file, str(folder)]
            ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [p.wait(timeout=300) for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    said = "\n".join((folder / f"output{rank}.txt").read_text()[-3000:] for rank in range(world))
    assert codes == [0] * world, said
