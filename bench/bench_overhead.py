"""What a step costs outside its kernels: a step so small that Python and the dispatcher are most of its time.

Rows (--only takes any part of a name), C = 1,000, d = 16, B = 8, m = 8, uniform draws:
  fused_per_row, fused_shared       whole step with the update inside backward, vs eager torch with torch.optim.Adagrad
  unfused_per_row, unfused_shared   the same head with its sparse gradient and RowAdagrad.step()
  ..._bias                          each of them with a bias, as heads have one by default
  floor_per_row, floor_shared       the ops of a fused step with no head around them, vs eager torch: no Python could be
                                    faster than that; floor_unfused_...: those of an unfused step, with no optimizer
  context_unigram                   fused step with `context=` given, as `samplex train` gives it on text / without it
  context_bigram                    fused step with a Bigram sampler and its context, drawn by a separate op / the same
  context_text                      context_unigram in the shape of text: h [2, 4, 16], y [2, 4], one context per token
  trainer_text                      a step of `samplex train` on text (GRU, fused head, a context per token) / the same
                                    step as a plain loop would write it
  import                            seconds that `import samplex_cuda` takes after `import torch`, in a fresh process

One thread by default: a step this small has nothing to share, but some of torch's operators enter a parallel region all
the same. Beside other busy processes its barrier then takes up to 100 ms, and the ratio says nothing about overhead.
A row whose times scatter says "disturbed" and gets no verdict.

Every row is measured in a separate process. A step is checked before it is timed: loss, d_hidden, updated rows and
Adagrad sums of each side against fp64.

Run it on an idle machine: python bench/bench_overhead.py
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _harness import (
    Comparison,
    Report,
    Row,
    Side,
    Timing,
    common_options,
    interleave,
    row_from,
    row_in_child,
    set_up,
    wanted,
    write_readme,
)
from _steps import SETS, Eager, Ours, RawOps, Sizes, make_inputs, refcheck, timed

import samplex_cuda as sx
from samplex_cuda import training
from samplex_cuda.training.step import Stepper

CLASSES, DIM, BATCH, M = 1_000, 16, 8, 8
TARGETS = {("fused", False): 5.0, ("fused", True): 4.0, ("unfused", False): 3.0, ("unfused", True): 3.0}
TOOLKIT = ("training", "data", "metrics", "diagnostics", "cli", "integrations", "sklearn", "index", "reproduce", "demo")
# What the child prints: seconds, and the modules above the core that the import has loaded.
IMPORT = f"""
import json, sys, time, torch
begin, cpu = time.perf_counter(), time.process_time()
import samplex_cuda
seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
print(json.dumps([seconds, cpu, [name for name in {TOOLKIT} if "samplex_cuda." + name in sys.modules]]))
"""


def disturbed(got: Comparison) -> str:
    """A note where a side's p80 is above three times its p20: other processes decided the times. Empty otherwise."""
    parts = [f"{name} p20 {t.p20:.2f} ms, p80 {t.p80:.2f} ms" for name, t in got.times.items() if t.p80 > 3 * t.p20]
    return f"disturbed, no verdict: {'; '.join(parts)}" if parts else ""


class Bench:
    """The rows. Each method measures one and returns it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = set_up(options)
        self.time = functools.partial(
            interleave,
            device=self.device,
            seconds=options.seconds,
            min_rounds=20 if options.quick else 60,
            max_rounds=400,
            block_seconds=0.01,
            sets=4 * SETS,  # at most 128 calls in a block
        )

    def rows(self) -> dict[str, Callable[[], Row]]:
        rows: dict[str, Callable[[], Row]] = {}
        for bias in (False, True):
            for (kind, shared), target in TARGETS.items():
                row_id = f"{kind}_{'shared' if shared else 'per_row'}{'_bias' if bias else ''}"
                rows[row_id] = functools.partial(
                    self.versus, row_id, kind == "fused", shared, bias, None if bias else target
                )
        for fused in (True, False):
            for shared in (False, True):
                row_id = f"floor_{'' if fused else 'unfused_'}{'shared' if shared else 'per_row'}"
                rows[row_id] = functools.partial(self.floor, row_id, shared, fused)
        rows["context_unigram"] = functools.partial(self.context, "context_unigram", "unigram", target=1.1)
        rows["context_bigram"] = functools.partial(self.context, "context_bigram", "bigram")
        rows["trainer_text"] = self.trainer_text
        rows["context_text"] = functools.partial(self.context, "context_text", "unigram", text=True)
        rows["import"] = self.imports
        return rows

    def versus(self, row_id: str, fused: bool, shared: bool, bias: bool, target: float | None) -> Row:
        sizes = Sizes(CLASSES, DIM, BATCH, M, shared, bias)
        mine, other = Ours(sizes, self.device, fused=fused), Eager(sizes, self.device)
        inputs = make_inputs(sizes, self.device)
        checked = refcheck([mine, other], mine, inputs.h[0], inputs.y[0])
        got = self.time([timed(mine, inputs), timed(other, inputs)])
        value, low, high = got.ratio(other.name, mine.name)
        note = disturbed(got)
        draws = "shared draws [8]" if shared else "draws [8, 8]"
        update = "fused update" if fused else "unfused update"
        return Row(
            row_id,
            f"step, {draws}, {update}{', bias' if bias else ''}, C = 1,000, d = 16, vs eager torch",
            value,
            "x",
            checked,
            target=None if note else target,
            note=note,
            ours=got.times[mine.name],
            other=got.times[other.name],
            other_name=other.name,
            spread=(low, high),
            config=sizes.config,
        )

    def floor(self, row_id: str, shared: bool, fused: bool) -> Row:
        sizes = Sizes(CLASSES, DIM, BATCH, M, shared)
        mine, other = RawOps(sizes, self.device, fused), Eager(sizes, self.device)
        inputs = make_inputs(sizes, self.device)
        got = self.time([timed(mine, inputs), timed(other, inputs)])
        value, low, high = got.ratio(other.name, mine.name)
        draws = "shared draws [8]" if shared else "draws [8, 8]"
        return Row(
            row_id,
            f"the ops of a step alone, {draws}, {'' if fused else 'un'}fused update, C = 1,000, d = 16, "
            "vs eager torch: the limit",
            value,
            "x",
            "none: the ops are those of the rows above",
            note=disturbed(got),
            ours=got.times[mine.name],
            other=got.times[other.name],
            other_name=other.name,
            spread=(low, high),
            config=sizes.config,
        )

    def context(self, row_id: str, sampler: str, *, text: bool = False, target: float | None = None) -> Row:
        sizes = Sizes(CLASSES, DIM, BATCH, M, bias=True)
        mine, plain = Ours(sizes, self.device, sampler), Ours(sizes, self.device, "unigram")
        inputs = make_inputs(sizes, self.device)
        checked = refcheck([mine], mine, inputs.h[0], inputs.y[0], inputs.context[0])
        checked += f"; without context: {refcheck([plain], plain, inputs.h[0], inputs.y[0])}"
        given = inputs
        if text:
            given = make_inputs(sizes, self.device)
            given.h[:] = [h.detach().view(2, BATCH // 2, DIM).requires_grad_(True) for h in given.h]
            given.y[:] = [y.view(2, BATCH // 2) for y in given.y]

        def step(i: int) -> torch.Tensor:
            return mine.step(given.h[i % SETS], given.y[i % SETS], context=given.context[i % SETS])

        got = self.time([Side("context", step), timed(plain, inputs, "plain")])
        value, low, high = got.ratio("context", "plain")
        note = disturbed(got)
        shape = ", h [2, 4, 16]" if text else ""
        return Row(
            row_id,
            f"fused step with context, {sampler} draws{shape} / without context, unigram draws, C = 1,000, d = 16",
            value,
            "ratio",
            checked,
            sense="<=",
            target=None if note else target,
            note=note,
            ours=got.times["context"],
            other=got.times["plain"],
            other_name="ours, without context",
            spread=(low, high),
            config={**sizes.config, "sampler": sampler},
        )

    def trainer_text(self) -> Row:
        tokens = torch.randint(CLASSES, (20_000,), generator=torch.Generator().manual_seed(0)).numpy()
        train = sx.data.Tokens(tokens, CLASSES, window=BATCH // 2, columns=2)
        settings = [
            "model.name=gru", f"model.dim={DIM}", f"model.hidden={DIM}", "sampler.name=unigram", "sampler.smoothing=1",
            f"head.num_samples={M}", "training.clip_norm=0", "training.batch_size=2",
        ]  # fmt: skip
        config = training.config.override(training.Config(), settings)

        def model() -> tuple[Any, sx.SampledClassifier, dict[str, torch.optim.Optimizer]]:
            encoder, head = training.build(config, train)
            made = training.optimizers(config, encoder, head)
            head.fuse_optimizer(made["head"])  # type: ignore[arg-type]
            return encoder, head, made

        trained, plain = model(), model()
        stepper = Stepper(config, train, 2, torch.tensor([0, 0]), "run")
        progress = training.Progress()
        losses: dict[str, list[float]] = {"trainer": [], "plain": []}

        def by_trainer(i: int) -> None:
            progress.step, progress.batch = i, i % stepper.epoch_batches
            losses["trainer"].append(stepper.take(progress, *trained).loss)

        batches = sx.data.Batches(train, 2, seed=config.training.seed, epoch=0)

        def by_hand(i: int) -> None:
            encoder, head, made = plain
            batch = train.batch(batches.rows(i % len(batches)))
            loss = head(encoder(batch), batch["y"], context=batch["tokens"], key=torch.tensor([0, i]))
            loss.backward()
            losses["plain"].append(float(loss.detach()))
            for name, optimizer in made.items():
                if name != "head":
                    optimizer.step()
                    optimizer.zero_grad()

        for i in range(3):
            by_trainer(i), by_hand(i)
        if losses["trainer"] != losses["plain"]:
            raise AssertionError(f"trainer_text: both sides must make the same steps, got {losses}")
        got = self.time([Side("trainer", by_trainer), Side("plain", by_hand)])
        value, low, high = got.ratio("trainer", "plain")
        return Row(
            "trainer_text",
            f"step of `samplex train` on text, GRU, {BATCH} tokens / the same in a plain loop, C = 1,000, d = 16",
            value,
            "ratio",
            "the losses of the first steps are the same bits",
            sense="<=",
            note=disturbed(got),
            ours=got.times["trainer"],
            other=got.times["plain"],
            other_name="plain loop",
            spread=(low, high),
            config={"C": CLASSES, "d": DIM, "tokens": BATCH, "m": M},
        )

    def imports(self) -> Row:
        seconds: list[float] = []
        of_cpu: list[float] = []
        loaded: list[str] = []
        # As an installed package is imported: from its compiled files, which the first process writes where they miss.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        for _ in range(8):  # the first finds cold files and is dropped
            command = [sys.executable, "-c", IMPORT]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
            wall, cpu, loaded = json.loads(done.stdout.splitlines()[-1])
            seconds.append(wall)
            of_cpu.append(cpu)
        took = Timing.of([1e3 * s for s in seconds[1:]])
        return Row(
            "import",
            "import samplex_cuda after import torch, seconds (median of 7 processes)",
            took.median / 1e3,
            "s",
            f"modules above the core that it loads: {', '.join(loaded) or 'none'}",
            sense="<=",
            target=0.1,
            ours=took,
            spread=(took.p20 / 1e3, took.p80 / 1e3),
            note=f"CPU time {Timing.of(of_cpu[1:]).median:.3f} s; above the core: {', '.join(loaded) or 'nothing'}",
        )


def main() -> int:
    parser = common_options(__doc__)
    parser.add_argument("--row", help="measure this row in this process and print it as JSON")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    # torch.optim.Adagrad builds its sparse updates so that torch warns once.
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    bench = Bench(options)
    if options.row:
        print(json.dumps(bench.rows()[options.row]().as_dict()))
        return 0
    on_cpu = bench.device.type == "cpu"
    name = "overhead" if on_cpu else f"overhead_{bench.device.type}"
    report = Report(name, bench.device, store=not (options.quick or options.no_store))
    for row_id in bench.rows():
        if wanted(options, row_id):
            report.add(row_from(row_in_child(__file__, row_id, sys.argv[1:]), on_cpu))
    code = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
