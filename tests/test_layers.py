"""The layers of the Python package: imports go down only, and `import samplex_cuda` loads the core alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import samplex_cuda

PACKAGE = Path(samplex_cuda.__file__).parent
CORE = """heads losses optim samplers tree_fit distributed draw rng tables _checks ops reference rff functional
    prediction chunking products _library _eager _driver _device info graphs"""
TOOLKIT = "training data metrics diagnostics cli integrations sklearn index testing"
PAPERS = "reproduce demo"
COMPILED = ("_native",)
RANK = {room: number for number, rooms in enumerate((CORE, TOOLKIT, PAPERS)) for room in rooms.split()}
# (module, room above it): only inside a function, so only when somebody calls it.
EXCEPTIONS = {
    ("samplex_cuda.heads", "index"): "head.index() makes a ClassIndex",
    ("samplex_cuda.cli.app", "demo"): "the command `samplex demo`",
    ("samplex_cuda.cli.app", "reproduce"): "the command `samplex reproduce`",
}


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["samplex_cuda", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """The first name below the package; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(source: str, module: str, is_package: bool) -> list[tuple[str, str]]:
    """(room, when) of every import of this package in a source: when is "load", "call" or "types"."""
    found: list[tuple[str, str]] = []

    def add(name: str, when: str) -> None:
        if name == "samplex_cuda" or name.startswith("samplex_cuda."):
            found.append((room_of(name), when))

    def walk(node: ast.AST, when: str) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name, when)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            if base == "samplex_cuda":
                for alias in node.names:
                    add(f"{base}.{alias.name}", when)
            else:
                add(base, when)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    add(argument.value, when)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = "call" if when == "load" else when
        elif _is_type_checking(node):
            when = "types"
        for child in ast.iter_child_nodes(node):
            walk(child, when)

    walk(ast.parse(source), "load")
    return found


def used_attributes(source: str) -> set[str]:
    """Rooms that a source reaches through `import samplex_cuda as sx`: sx.training, samplex_cuda.data."""
    tree = ast.parse(source)
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "samplex_cuda"
    }
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
    } & set(RANK)


def faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """Imports of a module that go up."""
    room = room_of(module)
    if not room:  # the package itself: see test_importing_the_package_loads_the_core_alone
        return [r for r, when in imports(source, module, is_package) if when == "load" and RANK.get(r, 0) > 0]
    found = imports(source, module, is_package) + [(name, "call") for name in used_attributes(source)]
    wrong = []
    for target, when in found:
        if RANK.get(target, 0) <= RANK[room]:
            continue
        allowed = any(
            target == above and (module == name or module.startswith(name + ".")) for name, above in EXCEPTIONS
        )
        if when == "load" or not allowed:
            wrong.append(f"{module} imports {target} ({when})")
    return wrong


def test_every_module_has_a_layer():
    rooms = {room_of(name) for name in modules()} - {""}
    assert rooms - set(RANK) - set(COMPILED) == set(), "name the layer of a new module above"
    assert set(RANK) <= rooms, "a module that is gone must leave its layer"


@pytest.mark.parametrize("name", list(modules()))
def test_imports_go_down(name):
    path = modules()[name]
    assert faults(name, path.read_text(), path.name == "__init__.py") == []


def test_exceptions_are_used():
    used = set()
    for name, path in modules().items():
        for target, when in imports(path.read_text(), name, path.name == "__init__.py"):
            used |= {
                pair for pair in EXCEPTIONS
                if pair[1] == target and when == "call" and (name == pair[0] or name.startswith(pair[0] + "."))
            }  # fmt: skip
    assert used == set(EXCEPTIONS), "an exception that nothing needs must go"


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("samplex_cuda.optim", "from samplex_cuda.training import Trainer", True),
        ("samplex_cuda.optim", "from samplex_cuda import data", True),
        ("samplex_cuda.optim", "import samplex_cuda.data.base", True),
        ("samplex_cuda.optim", "def f():\n    from samplex_cuda import metrics", True),
        ("samplex_cuda.optim", "if TYPE_CHECKING:\n    from samplex_cuda.training import Trainer", True),
        ("samplex_cuda.optim", "import importlib\nimportlib.import_module('samplex_cuda.data')", True),
        ("samplex_cuda.optim", "import samplex_cuda as sx\ndef f():\n    return sx.data.open('x')", True),
        ("samplex_cuda.samplers.base", "from ..data import Dense", True),
        ("samplex_cuda.samplers.base", "from .static import Uniform", False),
        ("samplex_cuda.training.models", "from samplex_cuda.reproduce import kernel", True),
        ("samplex_cuda.training.models", "from samplex_cuda import samplers", False),
        ("samplex_cuda.reproduce.kernel", "from samplex_cuda import data, heads", False),
        ("samplex_cuda.heads", "def index(self):\n    from samplex_cuda.index import ClassIndex", False),
        ("samplex_cuda.heads", "from samplex_cuda.index import ClassIndex", True),
        ("samplex_cuda.optim", "def index(self):\n    from samplex_cuda.index import ClassIndex", True),
        ("samplex_cuda", "from samplex_cuda import training", True),
        ("samplex_cuda", "from samplex_cuda import heads", False),
    ],
)
def test_the_checks_see_what_is_wrong(module, source, wrong):
    assert bool(faults(module, source, module == "samplex_cuda")) == wrong


# ---------------------------------------------------------------------------------------------------- what is private
def private_writes(source: str) -> list[str]:
    """Assignments to a private attribute of another object."""
    targets: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
    flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [
        ast.unparse(part)
        for part in flat
        if isinstance(part, ast.Attribute)
        and part.attr.startswith("_")
        and not (isinstance(part.value, ast.Name) and part.value.id in ("self", "cls"))
    ]


def lists_of_losses(source: str) -> list[str]:
    """Tuples, lists, sets and dicts that hold two names of losses or more."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
            parts = node.keys if isinstance(node, ast.Dict) else node.elts
            values = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
            if len(values & set(samplex_cuda.losses.names())) > 1:
                found.append(ast.unparse(node))
    return found


# data/ has no head to write to.
TOOLKIT_MODULES = [name for name in modules() if RANK.get(room_of(name)) == 1 and room_of(name) != "data"]


@pytest.mark.parametrize("name", TOOLKIT_MODULES)
def test_the_toolkit_uses_the_core_by_its_public_names(name):
    source = modules()[name].read_text()
    assert private_writes(source) == []
    assert lists_of_losses(source) == []


def test_private_writes_and_lists_of_losses_are_seen():
    assert private_writes("head._stale = True\nself._x = 1\nfusion._kept, n = [], 0\nhead._steps += 1") == [
        "head._stale", "fusion._kept", "head._steps"
    ]  # fmt: skip
    assert lists_of_losses('if loss in ("nce", "one_vs_each"):\n    x = ("nce", "other")') == ["('nce', 'one_vs_each')"]


# ---------------------------------------------------------------------------------------------------- what is loaded
def loaded(*statements: str) -> set[str]:
    """Names in sys.modules after some statements, in a new interpreter."""
    code = "\n".join([*statements, "import sys, json; print(json.dumps(sorted(sys.modules)))"])
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_the_core_alone():
    torch_alone, with_package = loaded("import torch"), loaded("import torch", "import samplex_cuda")
    ours = {name for name in with_package if name.startswith("samplex_cuda.")}
    above = {name for name in ours if RANK.get(room_of(name), 0) > 0}
    assert above == set()
    assert {"samplex_cuda.heads", "samplex_cuda.samplers", "samplex_cuda.optim"} <= ours
    new = {name.partition(".")[0] for name in with_package - torch_alone}
    heavy = {
        "matplotlib",
        "rich",
        "typer",
        "scipy",
        "pandas",
        "pyarrow",
        "sklearn",
        "faiss",
        "tensorboard",
        "lightning",
    }
    assert new & heavy == set()
    assert {"torch._dynamo", "torch._inductor", "torch.utils.tensorboard"} & (with_package - torch_alone) == set()


COLLECTIONS = """
import gc, json, sys
import torch
during = []
def note(phase, info):
    package = sys.modules.get("samplex_cuda")
    if phase == "start" and "samplex_cuda._library" in sys.modules and not hasattr(package, "__version__"):
        during.append(info["generation"])
gc.callbacks.append(note)
gc.set_threshold(100, 10, 10)
if not {enabled}:
    gc.disable()
if {broken}:
    sys.modules["samplex_cuda.heads"] = None
try:
    import samplex_cuda
except ImportError:
    pass
print(json.dumps([gc.isenabled(), "samplex_cuda" in sys.modules, len(during)]))
"""


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
def test_an_import_leaves_the_garbage_collector_as_it_was(enabled, broken):
    code = COLLECTIONS.format(enabled=enabled, broken=broken)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    enabled_after, imported, during = json.loads(done.stdout)
    assert (enabled_after, imported) == (enabled, not broken)
    assert during <= 1  # one when it is enabled again; with 13,000 new objects, 130 otherwise


def test_the_rest_is_loaded_on_first_use():
    found = loaded(
        "import samplex_cuda as sx", "sx.data.Dense", "assert 'samplex_cuda.training' not in __import__('sys').modules"
    )
    assert "samplex_cuda.data" in found
    found = loaded("import samplex_cuda as sx", "sx.training.Trainer")
    assert "samplex_cuda.training.trainer" in found


def test_lazy_names_are_listed_and_unknown_ones_are_errors():
    toolkit = {"data", "diagnostics", "metrics", "training"}
    assert toolkit <= set(dir(samplex_cuda)) & set(samplex_cuda.__all__)
    for name in samplex_cuda.__all__:
        getattr(samplex_cuda, name)
    with pytest.raises(AttributeError, match="module 'samplex_cuda' has no attribute 'trainning'"):
        samplex_cuda.trainning  # noqa: B018
