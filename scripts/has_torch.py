"""Exit status 0 when this environment has torch >= 2.13."""

from __future__ import annotations

import importlib.metadata
import re
import sys


def main() -> int:
    """Ask the installed metadata, not torch itself: importing it takes seconds."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return 1
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < (2, 13):
        print(f"torch must be >= 2.13, this environment has {version}")
        return 1
    print(f"== torch {version} is here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
