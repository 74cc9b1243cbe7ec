"""A rank of a sharded run, one of which stops itself by SIGSTOP: rank_stop.py RANK WORLD PORT FOLDER VICTIM STEP."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any


def main(rank: int, world: int, port: int, folder: Path, victim: int, at: int) -> None:
    """Train until the others miss the victim."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parent))
    from training_cases import case

    from samplex_cuda.training import Trainer
    from samplex_cuda.training.step import Stepper

    torch.set_num_threads(1)
    # As torchrun does; the store is that of the test, which outlives the ranks.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world),
                      LOCAL_RANK=str(rank), TORCHELASTIC_USE_AGENT_STORE="True")  # fmt: skip
    settings = ["training.shard=classes", "training.rank_timeout=5", "training.epochs=1000"]
    run, data, valid = case("mlp", "uniform", *settings)
    take = Stepper.take

    def step(self: Any, progress: Any, *args: Any) -> Any:
        if rank == victim and progress.step == at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return take(self, progress, *args)

    Stepper.take = step  # type: ignore[method-assign]
    # Imports take longer on some ranks than on others: rank_timeout counts from here on.
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=90))
    store.set(f"ready {rank}", "1")
    store.wait([f"ready {other}" for other in range(world)])
    Trainer(run, data, valid, folder).fit()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
