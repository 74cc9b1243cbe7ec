"""What the compile gate reads from machine code, on a listing written by hand."""

from __future__ import annotations

import re

import pytest
from test_packaging import ROOT, script

NO_BOARD = 7


def line(address: int, text: str, *, board: int = NO_BOARD, waits: int = 0) -> str:
    """An instruction as `nvdisasm -c -hex` writes it: the second word has the scoreboards."""
    control = board << 5 | waits << 11
    second = f"{control << 41:016x}"
    return (
        f"        /*{address:04x}*/                   {text} ;   /* 0x0000000000000918 */\n{' ' * 60}/* 0x{second} */"
    )


LOOP = "\n".join(
    [
        '\t.section\t.text._Z1kPf,"ax",@progbits',
        ".text._Z1kPf:",
        line(0x00, "LDG.E.128 R40, desc[UR4][R2.64]", board=0),
        line(0x10, "LDG.E.128 R44, desc[UR4][R2.64+0x10]", board=0),
        line(0x20, "LDG.E.128 R48, desc[UR4][R2.64+0x20]", board=0),
        line(0x30, "FADD R1, R40, R44", waits=0b1),
        ".L_x_1:",
        line(0x40, "@P0 LDG.E.64 R4, desc[UR4][R2.64]", board=0),
        line(0x50, "LD.E.128 R8, desc[UR4][R2.64+0x10]", board=1),
        line(0x60, "LDS.128 R16, [R3]", board=2),
        line(0x70, "DADD R20, R4, R20", waits=0b1),
        line(0x80, "LDG.E.U16 R5, desc[UR4][R2.64]", board=3),
        line(0x90, "FADD R1, R8, R5", waits=0b1010),
        line(0xA0, "LDG.E R7, desc[UR4][R2.64]", board=4),  # for the next round: waited for by nobody here
        line(0xB0, "STL [R1], R7"),
        line(0xC0, "@P1 BRA `(.L_x_1)"),
        line(0xD0, "EXIT"),
        ".L_x_2:",
        line(0xE0, "BRA `(.L_x_2)"),
        '\t.section\t.text._Z1sPf,"ax",@progbits',
        ".text._Z1sPf:",
        line(0x00, "LDG.E R7, desc[UR4][R2.64]", board=4),
        line(0x10, "LDG.E.64 R8, desc[UR4][R2.64]", board=4),
        line(0x20, "MUFU.RCP64H R9, R8", waits=0b10000),
        line(0x30, "LDG.E R7, desc[UR4][R2.64]", board=4),
        line(0x40, "LDC R1, c[0x0][0x28]", board=1),
    ]
)


def test_loads_local_memory_and_fp64():
    found = script("sass").parse_sass(LOOP)
    assert list(found) == ["_Z1kPf", "_Z1sPf"]
    figures = found["_Z1kPf"].figures()
    assert figures.loads == {16: 4, 8: 1, 4: 1, 2: 1}
    assert (figures.local, figures.fp64, figures.instructions) == (1, 1, 15)
    assert found["_Z1sPf"].figures().fp64 == 1


def test_bytes_in_flight_are_those_of_the_loop_in_steady_state():
    found = script("sass").parse_sass(LOOP)
    # 4 of the round before, 8 and 16 of this one; the 48 before the loop do not count.
    assert found["_Z1kPf"].figures().bytes_in_flight == 28
    assert [len(body) for body in found["_Z1kPf"].loops()] == [9]
    # No loop: the most at one point.
    assert found["_Z1sPf"].figures().bytes_in_flight == 12


@pytest.mark.parametrize(
    ("in_flight", "loads", "wanted"),
    [
        (64, {16: 4}, []),
        (8, {16: 4}, ["bytes in flight"]),
        (64, {8: 1}, ["16-byte"]),
        (8, {4: 1}, ["bytes", "16-byte"]),
    ],
)
def test_gate_refuses_idle_memory(monkeypatch, in_flight, loads, wanted):
    gate, sass = script("cuda_gate"), script("sass")
    figures = sass.Figures(instructions=10, loads=loads, local=0, fp64=0, bytes_in_flight=in_flight)
    kernel = gate.Kernel("x.cu", 90, "k", registers=64, threads=128, machine=figures)
    assert kernel.flight == in_flight * 32 * 32  # 64 registers: 32 warps
    monkeypatch.setattr(gate, "MEMORY_BOUND", {"update": "k<"})
    monkeypatch.setattr(gate, "FLIGHT_WAITING", {})
    faults = gate.flight_faults([kernel], {"k": "k<float>"})
    assert len(faults) == len(wanted)
    assert all(word in fault for word, fault in zip(wanted, faults, strict=True))
    # A kernel that is known to miss it may; one that is said to miss it and does not, may not.
    monkeypatch.setattr(gate, "FLIGHT_WAITING", {"update": "issue 1"})
    faults = gate.flight_faults([kernel], {"k": "k<float>"})
    assert ["FLIGHT_WAITING" in fault for fault in faults] == ([] if wanted else [True])
    # A kernel that was renamed does not slip through.
    assert "matches no kernel" in gate.flight_faults([kernel], {"k": "other"})[0]


def test_gate_refuses_local_memory():
    gate, sass = script("cuda_gate"), script("sass")
    figures = sass.Figures(instructions=10, loads={}, local=2, fp64=0, bytes_in_flight=0)
    kernel = gate.Kernel("x.cu", 90, "k", threads=128, machine=figures)
    assert kernel.faults() == ["2 accesses of local memory in the machine code"]
    kernel.prints = True
    assert kernel.faults() == []


def kernels() -> set[str]:
    """Names of the kernels in the sources."""
    found: set[str] = set()
    for path in ROOT.glob("csrc/**/*_kernel.cuh"):
        found |= set(re.findall(r"__global__[^;{]*?\b(\w+_kernel)\(", path.read_text()))
    return found


def test_the_page_of_resources_has_every_kernel():
    page = (ROOT / "docs" / "cuda_resources.md").read_text()
    assert len(kernels()) > 20
    assert {name for name in kernels() if f"`{name}" not in page} == set(), "run make cuda-gate"
    assert "| loads | in flight | fp64 |" in page
