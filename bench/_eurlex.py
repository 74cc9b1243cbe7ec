"""EURLex-4K, where a person has it: files in the format of the Extreme Classification repository, packed or not."""

from __future__ import annotations

from samplex_cuda.reproduce.adversarial_data import csr, eurlex, lines_of, read_xc, unit_rows

__all__ = ["csr", "eurlex", "lines_of", "read_xc", "unit_rows"]
