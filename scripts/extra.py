"""Print the requirements of one extra of pyproject.toml, one a line: `python scripts/extra.py lint`."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def requirements(text: str, extra: str) -> list[str]:
    """Requirements of `extra`. By regular expression: Python 3.10 has no tomllib, and the table is one line each."""
    table = text.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
    line = re.search(rf"^{re.escape(extra)} = \[(.*)\]$", table, re.MULTILINE)
    if line is None:
        raise SystemExit(f"extra.py: pyproject.toml has no extra '{extra}' on a line of its own")
    return re.findall(r'"([^"]+)"', line.group(1))


if __name__ == "__main__":
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    print("\n".join(requirements(pyproject.read_text(), sys.argv[1])))
