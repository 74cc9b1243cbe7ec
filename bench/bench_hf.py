"""A language model of transformers with a vocabulary of 250,000: a training step with all logits and with sampled ones.

Rows:
  hf_step     time of the model as it was / with `replace_lm_head`, 2,048 shared log-uniform draws; both with clipping
  hf_memory   peak memory of the two processes, the same ratio

The steps are those of examples/hf_large_vocabulary.py, each side in a separate process. It needs transformers
(`make test-integrations` has it). refcheck: the exact loss of both models on one batch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from _harness import Report, Row, Timing, common_options, set_up, wanted, write_readme

import samplex_cuda as sx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import hf_large_vocabulary as example

SIZE = {"vocabulary": 250_000, "steps": 6, "batch": 8, "length": 64}
QUICK = {"vocabulary": 20_000, "steps": 3, "batch": 2, "length": 16}


def refcheck() -> str:
    """Exact losses of the plain and of the changed model."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=5000, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.randint(5000, (4, 16))
    with torch.no_grad():
        want = float(model(input_ids=ids, labels=ids).loss)
        sx.integrations.hf.replace_lm_head(model, sx.samplers.LogUniform(5000), 64)
        error = abs(float(model.eval()(input_ids=ids, labels=ids).loss) - want) / want
    if error > 1e-5:
        raise AssertionError(f"refcheck hf: relative error {error:.2e} of the exact loss, allowed 1e-05")
    return f"exact loss against the plain model, relative error {error:.1e}"


def main() -> int:
    parser = common_options(__doc__ or "")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device != "cpu":
        raise SystemExit("bench_hf: --device must be cpu")
    size = QUICK if options.quick else SIZE
    device = set_up(options)
    if options.kind:
        print(json.dumps(example.measure(options.kind, **size)))
        return 0
    report = Report("hf", device, store=not (options.quick or options.no_store))
    found = {}
    for kind in ("full", "sampled"):
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--kind", kind]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[kind] = json.loads(done.stdout.splitlines()[-1])
    (full, full_gib), (ours, ours_gib) = found["full"], found["sampled"]
    full, ours = full[1:], ours[1:]  # the first step allocates
    checked = refcheck()
    common = {"refcheck": checked, "other_name": "all logits", "config": size}
    if wanted(options, "hf_step"):
        a, b = Timing.of(full), Timing.of(ours)
        what = f"GPT-2, vocabulary {size['vocabulary']:,}: step with all logits / sampled"
        report.add(Row("hf_step", what, a.median / b.median, "x", ours=b, other=a, **common))
    if wanted(options, "hf_memory"):
        what = f"GPT-2, vocabulary {size['vocabulary']:,}: peak memory with all logits / sampled"
        note = f"{full_gib:.2f} and {ours_gib:.2f} GiB"
        report.add(Row("hf_memory", what, full_gib / ours_gib, "x", note=note, **common))
    status = report.finish(fail=not options.no_fail)
    write_readme(report, options)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
