"""Every python block of docs/integrations runs, where its libraries are installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch.distributed as dist

import samplex_cuda as sx

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted((DOCS / "integrations").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FIRST = "# Before it, to try it"  # a block with what the one before it takes
# Import name of what a page needs besides torch.
LIBRARIES = {
    "accelerate": ["accelerate"],
    "datasets": ["datasets"],
    "hf": ["transformers", "accelerate", "datasets"],
    "lightning": ["lightning"],
    "loops": [],
    "sentence_transformers": ["sentence_transformers", "datasets"],
    "serving": ["usearch"],
    "torchmetrics": ["torchmetrics"],
}


@pytest.mark.filterwarnings("ignore")  # what the libraries recommend
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_run(page, tmp_path, monkeypatch, request):
    missing = [name for name in LIBRARIES[page.stem] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    monkeypatch.chdir(tmp_path)  # what a page writes
    text = page.read_text()
    found = sorted(BLOCK.finditer(text), key=lambda block: not block.group(1).startswith(FIRST))
    assert found, f"{page.name} has no example"
    names: dict[str, object] = {"__name__": page.stem}
    if page.stem == "loops":  # torchrun's work; tests/test_loops.py runs it on four ranks
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        request.addfinalizer(dist.destroy_process_group)
    for block in found:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block.group(1), str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_begin_with_ten_lines_to_copy(page):
    first = BLOCK.search(page.read_text()).group(1)
    assert len(first.splitlines()) <= 10, first
    assert not first.startswith(FIRST)
    assert "samplex_cuda" in first


def test_adapters_are_short():
    """Adapters, not frameworks."""
    modules = sorted(Path(sx.integrations.__file__).parent.glob("*.py"))
    assert len(modules) >= 10
    for module in modules:
        assert len(module.read_text().splitlines()) < 200, module.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
