"""Print the CUDA architectures that `make` builds for: the GPUs of this machine, or one PTX for any GPU.

Machine code for the GPUs that are here ('90-real'), which is what CMake calls native, but named, so that `samplex info`
can say what a GPU finds in the build. Without a GPU: 75-virtual, PTX that a driver compiles for any GPU from sm_75 on.
"""

from __future__ import annotations

import re
import shutil
import subprocess

PORTABLE = "75-virtual"
OLDEST = (7, 5)


def capabilities() -> str:
    """What nvidia-smi says of the GPUs here, one a line ('9.0'); empty without one."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def architectures(text: str) -> str:
    """'8.9\\n9.0\\n' -> '89-real;90-real'. GPUs that nvcc 13 does not know are left out."""
    found = {(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d)$", text, re.MULTILINE)}
    return ";".join(f"{major}{minor}-real" for major, minor in sorted(found) if (major, minor) >= OLDEST) or PORTABLE


if __name__ == "__main__":
    print(architectures(capabilities()))
