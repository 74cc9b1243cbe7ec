"""What the tests of data files share: small files, and how rows are read back."""

from __future__ import annotations

from pathlib import Path

import torch

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def csr(set_):
    """Rows of a sparse data set as Python lists: (labels, features, values)."""
    found = set_.batch(torch.arange(len(set_)))
    y = found["y"].reshape(len(set_), -1)
    ends = found["offsets"].tolist()
    return [
        (
            [v for v in y[i].tolist() if v != -100],
            found["ids"][ends[i] : ends[i + 1]].tolist(),
            [round(v, 4) for v in found["values"][ends[i] : ends[i + 1]].tolist()],
        )
        for i in range(len(set_))
    ]


XC = "4 6 9\n3,8 0:0.5 5:1\n 1:2 2:-3.5e-1\n7\n0 3:4 \n"
XC_ROWS = [([3, 8], [0, 5], [0.5, 1.0]), ([], [1, 2], [2.0, -0.35]), ([7], [], []), ([0], [3], [4.0])]
