"""Which NVIDIA driver is here, which one the kernels need, and what a GPU finds in this build: machine code or PTX."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["driver_cuda", "driver_version", "is_older", "kernels_for", "needed_driver"]

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
# CUDA release notes, "CUDA Toolkit and Minimum Required NVIDIA Driver Version for minor version compatibility".
_NEEDED = {11: 450, 12: 525, 13: 580}


def driver_version(kernel_module: Path = _KERNEL_MODULE) -> str | None:
    """The version of the NVIDIA driver ('580.65.06'), or None without a driver."""
    text = ""
    try:
        text = kernel_module.read_text()
    except OSError:
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            done = subprocess.run(query, capture_output=True, text=True, check=False)
            text = done.stdout if done.returncode == 0 else ""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def driver_cuda(library: str = "libcuda.so.1") -> str | None:
    """The newest CUDA version the driver serves ('13.0'); None if there is no driver."""
    number = ctypes.c_int(0)
    try:
        status = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}" if status == 0 and number.value else None


def needed_driver(cuda_version: str | None) -> int | None:
    """The oldest driver branch (580 for CUDA 13) that runs kernels built with `cuda_version`; None if not known."""
    return _NEEDED.get(int(cuda_version.split(".")[0])) if cuda_version else None


def is_older(version: str | None, than: str | int | None) -> bool:
    """Whether one dotted version is older than another; False if one of them is not known."""
    if version is None or than is None:
        return False
    wanted = [int(part) for part in str(than).split(".")]
    return [int(part) for part in version.split(".")][: len(wanted)] < wanted


def kernels_for(capability: str, archs: list[str]) -> tuple[str, str | None]:
    """What a GPU of this compute capability ('8.9') takes from a build for `archs` (as CMake writes them).

    Machine code runs on the same major version from its own minor version on; PTX is compiled by the driver for every
    later GPU.

    Returns:
        ("machine code", "sm_86"), ("PTX", "compute_75"), ("none", None), or ("unknown", None) for names such as 'all'.
    """
    major, minor = (int(part) for part in capability.split("."))
    code, virtual = [], []
    for arch in archs:
        match = re.fullmatch(r"(\d+)(\d)(?:-(real|virtual))?", arch)
        if match is None:
            return "unknown", None
        version, kind = (int(match.group(1)), int(match.group(2))), match.group(3)
        if kind != "virtual" and version[0] == major and version[1] <= minor:
            code.append(version)
        if kind != "real" and version <= (major, minor):
            virtual.append(version)
    if code:
        return "machine code", "sm_{}{}".format(*max(code))
    return ("PTX", "compute_{}{}".format(*max(virtual))) if virtual else ("none", None)
