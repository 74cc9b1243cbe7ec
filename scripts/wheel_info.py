"""Say whether wheels have CUDA kernels: python scripts/wheel_info.py WHEEL ... [--expect cuda|cpu]

A wheel has them if libsamplex.so has the ELF section .nv_fatbin. With --expect the exit code is 1 if a wheel differs,
or if its build tag does not say what it has.
"""

from __future__ import annotations

import argparse
import struct
import sys
import zipfile
from pathlib import Path


def elf_sections(data: bytes) -> list[str]:
    """Names of the sections of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("elf_sections: data must be a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    start, length = headers[names_at][4], headers[names_at][5]
    names = data[start : start + length]
    return [names[header[0] : names.index(b"\0", header[0])].decode() for header in headers]


def has_device_code(wheel: Path) -> bool:
    """Whether the op library of a wheel has CUDA kernels."""
    with zipfile.ZipFile(wheel) as archive:
        return ".nv_fatbin" in elf_sections(archive.read("samplex_cuda/libsamplex.so"))


def main() -> int:
    """One line per wheel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].split(":")[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--expect", choices=["cuda", "cpu"])
    options = parser.parse_args()
    status = 0
    for wheel in options.wheels:
        found = "cuda" if has_device_code(wheel) else "cpu"
        right = options.expect is None or (found == options.expect and found in wheel.name.split("-")[2])
        print(f"{wheel.name}: {found}" + ("" if right else f", expected {options.expect} and a build tag that says so"))
        status |= not right
    return status


if __name__ == "__main__":
    sys.exit(main())
