"""The experiments of five papers as commands: `samplex reproduce NAME` (docs/reproduce.md).

Each paper is a module with `TITLE`, `PAPER` and `run(r: Run)`; `report` has what they share.
"""

from samplex_cuda.reproduce.report import NAMES, Result, Run, load, run_paper, write_index

__all__ = ["NAMES", "Result", "Run", "load", "run_paper", "write_index"]
