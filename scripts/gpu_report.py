"""For the owner of a GPU: tests, gates, benchmarks and a profile, and one report file to send back.

    make gpu                                         or: python scripts/gpu_report.py
    python scripts/gpu_report.py --dry-run           says what would run; needs no GPU
    python scripts/gpu_report.py --only tests steps

Writes gpu_report.md into the current folder. It holds the GPU, the driver, versions and results; names of the user, the
machine and folders are taken out. Exit status: 0 everything passed, 1 something failed, 2 there is no GPU to run on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import getpass
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = {"liger_kernel": "liger-kernel", "fbgemm_gpu": "fbgemm-gpu"}
BENCHES = ("step", "sampled_softmax", "full_softmax", "predict", "row_rules", "tree", "kernel_tree", "overhead")
KEPT_LINES = 60


@dataclasses.dataclass
class Stage:
    """One command of the report."""

    name: str
    command: list[str]
    seconds: float = 0.0
    status: int | None = None  # None: not run
    output: str = ""
    why_not: str = ""


def stages(capability: str | None, work: Path, *, quick: bool) -> list[Stage]:
    """What is run, in this order. `capability`: of the GPU here ('9.0')."""
    python = sys.executable
    arch = (capability or "9.0").replace(".", "")
    listed = re.findall(r"\d+", re.search(r"^ARCHS = \((.*)\)$", gate_text(), re.MULTILINE).group(1))
    gate = Stage("gate", [python, "scripts/cuda_gate.py", "--archs", arch, "--output", str(work / "resources.md")])
    if shutil.which("nvcc") is None:
        gate.why_not = "nvcc is not on PATH"
    elif arch not in listed:
        gate.why_not = f"sm_{arch} is not in the gate's list"
    bench = ["--device", "cuda", "--no-store", "--no-fail", *(["--quick"] if quick else [])]
    seconds = "0.3" if quick else "3"
    return [
        Stage("tests", [python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]),
        gate,
        Stage("steps", [python, "bench/gpu_steps.py", "--seconds", seconds, "--json", str(work / "steps.json")]),
        *(Stage(f"bench {name}", [python, f"bench/bench_{name}.py", *bench]) for name in BENCHES),
    ]


def gate_text() -> str:
    """The source of the compile gate: its list of architectures is the one that counts."""
    return (ROOT / "scripts" / "cuda_gate.py").read_text()


def run(stage: Stage, environment: dict[str, str]) -> None:
    """Run one stage and keep what it said; it is shown as it comes."""
    begin = time.monotonic()
    lines = []
    with subprocess.Popen(
        stage.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    stage.status, stage.seconds, stage.output = process.returncode, time.monotonic() - begin, "".join(lines)


# ------------------------------------------------------------------------------------------------ the report
def secrets() -> dict[str, str]:
    """What must not leave this machine, and what stands in its place; the longest first."""
    found = {str(Path.cwd()): "<here>", str(Path.home()): "<home>", sys.prefix: "<env>", str(ROOT): "<project>"}
    found[tempfile.gettempdir()] = "<tmp>"
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        found[getpass.getuser()] = "<user>"
    for name in (platform.node(), platform.node().split(".")[0]):
        found[name] = "<host>"
    return {key: found[key] for key in sorted(found, key=len, reverse=True) if len(key) > 1}


def without(text: str, names: dict[str, str]) -> str:
    """`text` without personal names. A user's or machine's name goes only as a whole word."""
    for name, stand_in in names.items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", stand_in, text)
    return text


def missing_packages() -> list[str]:
    """What is compared where it is installed, and is not."""
    return [package for module, package in OPTIONAL.items() if importlib.util.find_spec(module) is None]


def step_rows(found: dict[str, Any]) -> list[str]:
    """The steps: measured beside computed."""
    lines = [
        f"Copy bandwidth {found['bandwidth'] / 1e12:.2f} TB/s; computed figures are those of the {found['model']} in",
        "docs/gpu_model.md.",
        "",
        "| step | ours | ours, graph | computed | others |",
        "|---|---|---|---|---|",
    ]
    for step in found["steps"]:
        if "error" in step:
            lines.append(f"| {step['step']} | failed: {' '.join(step['error'].split())[:300]} | | | |")
            continue
        times = dict(step["milliseconds"])
        own, graph = times.pop("ours"), times.pop("ours, graph", None)
        others = ", ".join(f"{name} {value:.3f} ms" for name, value in times.items())
        notes = f" ({'; '.join(step['notes'])})" if step["notes"] else ""
        shown = "-" if graph is None else f"{graph:.3f} ms"
        computed = "-" if step["computed"] is None else f"{step['computed']:.3f} ms"
        lines.append(f"| {step['step']} | {own:.3f} ms | {shown} | {computed} | {others}{notes} |")
    profile = found.get("profile", {})
    if "kernels" in profile:
        lines += ["", f"Launches per step (per row, m = 64), by the profiler: {profile['launches']}", ""]
        lines += ["| kernel | per step | µs per step |", "|---|---|---|"]
        lines += [f"| `{k['name'][:110]}` | {k['per_step']:g} | {k['microseconds']:.1f} |" for k in profile["kernels"]]
    elif profile:
        lines += ["", f"The profile failed: {profile.get('error', 'no reason given')}"]
    return lines


def verdict(stage: Stage) -> str:
    """Result of the stage in one word, or the reason it was left out."""
    if stage.why_not:
        return f"left out: {stage.why_not}"
    return "not run" if stage.status is None else "passed" if stage.status == 0 else f"FAILED ({stage.status})"


def report(info: dict[str, Any], done: list[Stage], steps: dict[str, Any] | None) -> str:
    """The Markdown file, without personal names."""
    build, machine = info["build"], info["machine"]
    today = datetime.datetime.now(datetime.timezone.utc)
    lines = [
        "# samplex-cuda on a GPU",
        "",
        f"{today:%Y-%m-%d}, version {build['version']}, commit {build['commit']}.",
        f"Python {info['runtime']['python']}, torch {info['runtime']['torch']}, {machine['system']}.",
        f"Built with CUDA {build['cuda_version']} for {', '.join(build['cuda_archs'])}; driver {machine['driver']}.",
        "",
        *(
            f"- cuda:{index}: {device['name']}, compute {device['capability']}, {device['memory'] / 2**30:.0f} GiB, "
            f"runs {device['kernels']} ({device['kernels_arch']})"
            for index, device in enumerate(machine["cuda_devices"])
        ),
        "",
        "| stage | result | seconds |",
        "|---|---|---|",
        *(f"| {stage.name} | {verdict(stage)} | {stage.seconds:.0f} |" for stage in done),
        "",
    ]
    if missing := missing_packages():
        lines += [f"Not installed, so not compared: {', '.join(missing)}.", ""]
    if steps is not None:
        lines += ["## Steps", "", *step_rows(steps), ""]
    for stage in done:
        if stage.output:
            kept = stage.output.strip().splitlines()[-KEPT_LINES:]
            lines += [f"## {stage.name}", "", "```", *kept, "```", ""]
    return without("\n".join(lines), secrets())


# ------------------------------------------------------------------------------------------------ command line
def why_not() -> str:
    """Why nothing can be run here; empty if it can."""
    from samplex_cuda.info import _cuda_status, gather_info

    said = _cuda_status(gather_info())
    return "" if said == "yes" else said.removeprefix("no: ")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 passed, 1 something failed, 2 no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="STAGE", help="stages whose name contains one of these"
    )
    parser.add_argument("--quick", action="store_true", help="short timings")
    parser.add_argument("--output", type=Path, default=Path("gpu_report.md"))
    options = parser.parse_args(argv)
    from samplex_cuda.info import gather_info

    info, reason = gather_info(), why_not()
    devices = info["machine"]["cuda_devices"]
    with tempfile.TemporaryDirectory(prefix="samplex-gpu-") as name:
        planned = stages(devices[0]["capability"] if devices else None, Path(name), quick=options.quick)
        chosen = [s for s in planned if not options.only or any(part in s.name for part in options.only)]
        if options.dry_run:
            for stage in chosen:
                shown = " ".join([Path(stage.command[0]).name, *stage.command[1:]])
                print(f"{stage.name}: {verdict(stage) if stage.why_not else shown}")
            print(f"not installed, so not compared: {', '.join(missing_packages()) or 'nothing'}")
            print(f"on this machine: {'everything can run' if not reason else f'nothing can run: {reason}'}")
            return 0
        if reason:
            print(f"make gpu: there is no GPU to run on: {reason}", file=sys.stderr)
            print("make gpu: `python scripts/gpu_report.py --dry-run` says what would run", file=sys.stderr)
            return 2
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        for stage in chosen:
            print(f"== {stage.name}", flush=True)
            if not stage.why_not:
                run(stage, environment)
            print(f"== {stage.name}: {verdict(stage)}", flush=True)
        found = Path(name) / "steps.json"
        steps = json.loads(found.read_text()) if found.exists() else None
    options.output.write_text(report(info, chosen, steps), encoding="utf-8")
    failed = [stage.name for stage in chosen if stage.status]
    print(f"make gpu: report in {options.output}; please read it before you send it")
    print(f"make gpu: {'all stages passed' if not failed else 'failed: ' + ', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
