"""Reads machine code (SASS) of compiled kernels: loads by width, local memory, fp64, bytes in flight.

Needs nvdisasm, which runs without a GPU: `pip install nvidia-cuda-nvdisasm` (extra `gate`), or the CUDA toolkit's.

In flight is what one thread has asked of global memory and no instruction has waited for yet, the most at one point:
of the loops that load, in steady state, or of the whole kernel if no loop loads. ptxas writes into each instruction on
which of six scoreboards it reports and for which it waits, so nothing is guessed. Code is walked in the order of
addresses, both sides of a branch, and all lanes count as active: an upper bound.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_NO_BOARD = 7
_SECTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)([^;]*);\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND_WORD = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_FP64 = re.compile(r"^(?:D(?:ADD|MUL|FMA|SETP|MNMX)|MUFU\.\w*64H|[FI]2[FI](?:\.\w+)*\.F64(?:\.|$))")
_LOCAL = re.compile(r"^(?:LDL|STL)(?:\.|$)")
# A generic load (LD) is one whose address ptxas could not place: here always rows in global memory.
_GLOBAL_LOAD = re.compile(r"^LDG?(?:\.|$)")


@dataclasses.dataclass
class Instruction:
    """One instruction: what it does, the scoreboard its result reports on, and those it waits for."""

    address: int
    opcode: str
    target: str | None
    board: int
    waits: int

    @property
    def load_bytes(self) -> int:
        """Bytes that one thread loads from global memory; 0 if this is no such load."""
        if not _GLOBAL_LOAD.match(self.opcode):
            return 0
        for part in self.opcode.split("."):
            if part in ("256", "128", "64"):
                return int(part) // 8
            if part in ("U8", "S8"):
                return 1
            if part in ("U16", "S16"):
                return 2
        return 4


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the machine code of one kernel says."""

    instructions: int
    loads: dict[int, int]  # how many loads from global memory have each width in bytes, the widest first
    local: int  # accesses of local memory: spills, and arrays that are indexed at run time
    fp64: int  # instructions of the fp64 unit
    bytes_in_flight: int  # the most bytes that one thread waits for at once, see the module


@dataclasses.dataclass
class SassKernel:
    """The instructions of one kernel, and where its labels point."""

    code: list[Instruction] = dataclasses.field(default_factory=list)
    labels: dict[str, int] = dataclasses.field(default_factory=dict)

    def loops(self) -> list[list[Instruction]]:
        """Bodies of loops, by their branches backward."""
        found = []
        for ins in self.code:
            start = self.labels.get(ins.target or "")
            if start is not None and start < ins.address:  # a branch to itself ends a kernel and is no loop
                found.append([other for other in self.code if start <= other.address <= ins.address])
        return found

    def figures(self) -> Figures:
        """Counts over the whole kernel."""
        loads = collections.Counter(ins.load_bytes for ins in self.code if ins.load_bytes)
        loops = [body for body in self.loops() if any(ins.load_bytes for ins in body)]
        return Figures(
            instructions=len(self.code),
            loads=dict(sorted(loads.items(), reverse=True)),
            local=sum(_LOCAL.match(ins.opcode) is not None for ins in self.code),
            fp64=sum(_FP64.match(ins.opcode) is not None for ins in self.code),
            bytes_in_flight=max(
                (_most_in_flight(body, rounds=2) for body in loops), default=_most_in_flight(self.code, rounds=1)
            ),
        )


def _most_in_flight(code: list[Instruction], rounds: int) -> int:
    waiting: collections.Counter[int] = collections.Counter()
    most = 0
    for _ in range(rounds):
        for ins in code:
            for board in range(6):
                if ins.waits >> board & 1:
                    waiting[board] = 0
            if ins.load_bytes and ins.board != _NO_BOARD:
                waiting[ins.board] += ins.load_bytes
                most = max(most, sum(waiting.values()))
    return most


def parse_sass(text: str) -> dict[str, SassKernel]:
    """Kernels by mangled name in what `nvdisasm -c -hex` writes."""
    kernels: dict[str, SassKernel] = {}
    kernel, labels, last = SassKernel(), [], None
    for line in text.splitlines():
        if match := _SECTION.match(line):
            kernel = kernels.setdefault(match.group(1), SassKernel())
            labels, last = [], None
        elif match := _LABEL.match(line):
            labels.append(match.group(1))
        elif match := _INSTRUCTION.match(line):
            address, opcode, rest, _ = match.groups()
            target = _TARGET.search(rest) if opcode.startswith("BRA") else None
            last = Instruction(int(address, 16), opcode, target.group(1) if target else None, _NO_BOARD, 0)
            kernel.code.append(last)
            for label in labels:
                kernel.labels[label] = last.address
            labels = []
        elif last is not None and (match := _SECOND_WORD.match(line)):
            control = int(match.group(1), 16) >> 41
            last.board, last.waits, last = control >> 5 & 7, control >> 11 & 63, None
    return kernels


def find_nvdisasm() -> str | None:
    """Path of nvdisasm: the package in this environment, PATH, or the folder of nvcc; None if not found."""
    places = [str(path) for folder in sys.path for path in Path(folder).glob("nvidia/cu*/bin")]
    places += [os.environ.get("PATH", "")]
    if nvcc := shutil.which("nvcc"):
        places.append(str(Path(nvcc).resolve().parent))
    return shutil.which("nvdisasm", path=os.pathsep.join(places))


def read_cubin(nvdisasm: str, cubin: Path) -> dict[str, Figures]:
    """Figures of the kernels of a cubin by mangled name."""
    done = subprocess.run([nvdisasm, "-c", "-hex", "-ndf", str(cubin)], check=True, capture_output=True, text=True)
    return {name: kernel.figures() for name, kernel in parse_sass(done.stdout).items()}
