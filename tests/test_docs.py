"""Every python block of these pages runs, page by page, top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs"
NAMES = [
    "attention.md",
    "busy.md",
    "changing_classes.md",
    "contrastive.md",
    "cuda_graphs.md",
    "samplers.md",
    "scale.md",
    "migration.md",
    "faq.md",
    "diagnostics.md",
    "faces.md",
    "security.md",
]
PAGES = [*(DOCS / name for name in NAMES), *sorted((DOCS / "samplers").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line of the file, source) of each block."""
    text = page.read_text()
    return [(text[: found.start(1)].count("\n"), found.group(1)) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a page writes
    found = blocks(page)
    assert found, f"{page.name} has no example"
    threads = torch.get_num_threads()
    names: dict[str, object] = {"__name__": page.stem}
    try:
        for line, source in found:
            # Errors name the line of the page.
            exec(compile("\n" * line + source, str(page), "exec"), names)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_sampler_has_a_page():
    import samplex_cuda as sx

    text = "\n".join(page.read_text() for page in sorted((DOCS / "samplers").glob("*.md")))
    index = (DOCS / "samplers.md").read_text()
    for page in (DOCS / "samplers").glob("*.md"):
        assert f"(samplers/{page.name})" in index
    for name in sx.samplers.__all__:
        if name not in ("Sampler", "Exclude", "ExactSampler", "KernelSampler", "StaticSampler"):
            assert f"sx.samplers.{name}" in text, name


def test_files_that_the_architecture_page_names_exist():
    text = (DOCS / "architecture.md").read_text()
    named = re.findall(r"`((?:python|csrc|tests|docs|bench)/[\w./]*)`", text)
    assert len(named) > 30
    assert [name for name in named if not (DOCS.parent / name).exists()] == []
