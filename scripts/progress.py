"""Run a build command and show its progress every few seconds: python scripts/progress.py [--verbose] CMD ...

The command's output goes to build/build.log. What is shown are the steps of ninja, "[12/187] static_sample_cpu.cpp", at
most one every SECONDS, and a sign of life if nothing else comes. If the command fails, the end of the log is printed.
With --verbose everything is shown as it comes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "build" / "build.log"
SECONDS = 5.0
TAIL = 60
STEP = re.compile(r"^\s*\[(\d+)/(\d+)\]\s+(.*)$")


def step_of(line: str) -> str | None:
    """A line of ninja in short, "[12/187] name of the file"; None for any other line."""
    found = STEP.match(line)
    if not found:
        return None
    done, steps, what = found.groups()
    name = re.sub(r"\.(o|obj)$", "", what.split()[-1]).rsplit("/", 1)[-1]
    return f"[{done}/{steps}] {name}"


def run(command: list[str], seconds: float = SECONDS) -> int:
    """The exit status of the command."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    shown, current = begun, "configuring"
    done = threading.Event()
    lock = threading.Lock()

    def say(now: float) -> None:
        nonlocal shown
        print(f"   {current}  ({now - begun:.0f} s)", flush=True)
        shown = now

    def watch() -> None:
        while not done.wait(seconds / 5):
            with lock:
                now = time.monotonic()
                if now - shown >= 2 * seconds:
                    say(now)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    lines: list[str] = []
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with LOG.open("w") as log, subprocess.Popen(command, **pipe) as process:
        for line in process.stdout or ():
            log.write(line)
            lines = [*lines[-TAIL:], line]
            step = step_of(line)
            with lock:
                if step is not None:
                    current = step
                    if time.monotonic() - shown >= seconds:
                        say(time.monotonic())
    status = process.returncode
    done.set()
    watcher.join()
    if status:
        sys.stderr.write("".join(lines[-TAIL:]))
        sys.stderr.write(f"progress: the command failed with status {status}; the whole output is in {LOG}\n")
    else:
        print(f"   done  ({time.monotonic() - begun:.0f} s)", flush=True)
    return status


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--verbose"]:
        sys.exit(subprocess.run(arguments[1:], check=False).returncode)
    sys.exit(run(arguments))
