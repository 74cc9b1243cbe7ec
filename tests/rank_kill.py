"""A sharded run whose ranks kill themselves; started by torchrun, which starts all of them again.

    python -m torch.distributed.run --nproc_per_node 2 --max-restarts N rank_kill.py FOLDER ENCODER STEPS KILLS SEED

In attempt number n < KILLS, one rank dies by SIGKILL: some time after it has begun a step, or some time after it has
begun to save. Each death is noted in FOLDER/kills before it happens.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

EVERY = 3  # steps between two checkpoints


def settings(encoder: str, steps: int) -> list[str]:
    """Of the run.

    The time-out is a guard, not a part of what is tested: torchrun sees that a rank has died and ends the others after
    its monitor interval of 0.1 s, so no recovery waits for it. Every wait counts towards it, imports of the other rank
    and pauses of a busy machine too: with 60 s, an attempt could end without a kill, which takes one of the restarts,
    and the test refuses that ("an attempt ended by itself"). 900 s is half of the limit of a storm, so that a rank that
    hangs is still named in the output. That short time-outs name the right rank: rank_stop.py, which uses 5 s.
    """
    return [f"training.shard_encoder={encoder}", f"training.steps={steps}", "training.epochs=100000",
            f"training.checkpoint_every={EVERY}", "training.eval_every=8", "training.keep=2",
            "training.rank_timeout=900"]  # fmt: skip


def die(folder: Path, about: dict[str, Any], delay: float) -> None:
    """SIGKILL after a while, wherever the process is then."""

    def work() -> None:
        time.sleep(delay)
        with (folder / "kills").open("a") as file:
            file.write(json.dumps(about) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=work, daemon=True).start()


def main(folder: Path, encoder: str, steps: int, kills: int, seed: int) -> None:
    """Train, with the kill that is due in this attempt."""
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    from training_cases import case

    from samplex_cuda import distributed
    from samplex_cuda.training import Trainer
    from samplex_cuda.training.step import Stepper

    torch.set_num_threads(1)
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    run, data, valid = case("mlp", "tree", "training.shard=classes", *settings(encoder, steps))
    run_dir = folder / "run"
    if (run_dir / "config.toml").exists():
        trainer = Trainer.resume(run_dir, data, valid)
    else:
        trainer = Trainer(run, data, valid, run_dir)
    start = trainer.progress.step
    rng = random.Random(seed * 1000 + attempt)
    victim, in_save = rng.randrange(world), attempt % 2 == 1
    after = rng.randrange(1, EVERY + 1) if in_save else rng.randrange(EVERY + 1, 3 * EVERY)
    delay = rng.uniform(0.0, 0.02)
    if attempt < kills and rank == victim:
        about = {"attempt": attempt, "rank": rank, "in_save": in_save, "began_at": start}
        if in_save:
            real, count = distributed.save_checkpoint, 0

            def save(*args: Any, **options: Any) -> None:
                nonlocal count
                count += 1
                if count == after:
                    die(folder, about, delay)
                real(*args, **options)

            distributed.save_checkpoint = save
        else:
            take = Stepper.take

            def step(self: Any, progress: Any, *args: Any) -> Any:
                if progress.step == start + after:
                    die(folder, about, delay)
                return take(self, progress, *args)

            Stepper.take = step  # type: ignore[method-assign]
    trainer.fit()
    trainer.ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
