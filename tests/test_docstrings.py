"""Every example in a docstring runs, and every public function of the package has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import samplex_cuda

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(samplex_cuda.__path__, "samplex_cuda.")
    if not module.name.rsplit(".", 1)[1].startswith(("_", "lib"))  # compiled parts
)


@pytest.mark.parametrize("name", ["samplex_cuda", *MODULES])
def test_examples_run(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:  # an adapter whose library is not installed: `make test-integrations`
        if not name.startswith("samplex_cuda.integrations."):
            raise
        pytest.skip(f"{missing.name} not installed")
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    "name",
    [
        "samplex_cuda.diagnostics",
        "samplex_cuda.functional",
        "samplex_cuda.samplers",
        "samplex_cuda.heads",
        "samplex_cuda.optim",
        "samplex_cuda.tree_fit",
        "samplex_cuda.rff",
        "samplex_cuda.data",
        "samplex_cuda.metrics",
        "samplex_cuda.reproduce",
        "samplex_cuda.training",
        "samplex_cuda.training.checkpoint",
        "samplex_cuda.training.config",
        "samplex_cuda.training.models",
    ],
)
def test_public_names_have_examples(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        thing = getattr(module, public)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert ">>>" in (inspect.getdoc(thing) or ""), f"{name}.{public} has no example"
