"""Runs the notebooks of examples/ and stores what each cell prints as its output: python scripts/notebooks.py

Execution counts and metadata that change from run to run are not stored.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"


def run(path: Path) -> list[str]:
    """What each code cell prints."""
    names: dict[str, Any] = {"__name__": path.stem}
    printed = []
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"{path.name}, code cell {number + 1}", "exec"), names)
        printed.append(out.getvalue())
    return printed


def stored(path: Path) -> list[str]:
    """The stored output of each code cell."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in cells]


def main() -> None:
    """Writes the outputs into the notebooks."""
    torch.set_num_threads(1)
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        printed = iter(run(path))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                text = next(printed).splitlines(keepends=True)
                cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
                cell["execution_count"] = None
        scratch_file = path.with_suffix(".tmp")
        scratch_file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        os.replace(scratch_file, path)
        print(f"notebooks: {path.name} written")


if __name__ == "__main__":
    main()
