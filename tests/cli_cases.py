"""What the tests of the command line share."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from samplex_cuda.cli.app import app


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Import it, and every test of the module has it: the sizes are tiny, and other tests run beside these."""
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def samplex(*words, code=0):
    """Output of a command that ends with `code`; None: any."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code is None or result.exit_code == code, result.output
    return result
