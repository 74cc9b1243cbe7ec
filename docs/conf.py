"""Settings of the documentation site: `make docs` builds it in build/docs, without network, with warnings as errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

project = "samplex-cuda"
author = "The samplex-cuda maintainers"
project_copyright = author
release = re.search(r"project\(samplex_cuda VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "extra_repr"}
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "literal"  # single backquotes in tables of docstrings

html_theme = "furo"
html_title = f"samplex-cuda {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "monokai"

# ------------------------------------------------------------------------------------------------ docstrings
# Docstrings are plain text with names in single backquotes, as `help()` shows them best. reStructuredText would read a
# star or a bar as markup, so these are escaped, and single backquotes become literals.
SPAN = re.compile(r"``.+?``|`[^`]+`")
MARKUP = re.compile(r"([*|\\]|(?<=\w)_(?=\W|$))")


def _literal(line: str) -> str:
    parts, end = [], 0
    for found in SPAN.finditer(line):
        parts.append(MARKUP.sub(r"\\\1", line[end : found.start()]))
        parts.append(f"``{found.group(0).strip('`')}``")
        end = found.end()
    parts.append(MARKUP.sub(r"\\\1", line[end:]))
    return "".join(parts)


SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Examples?|Notes?):\s*$")


def as_restructured_text(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText: Google-style sections, tables and indented blocks stay, the rest is escaped."""
    found: list[str] = []
    section, in_list = "", False
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        header = SECTION.match(paragraph)
        if header:
            section = header[1]
        elif not paragraph.startswith(" "):
            section, in_list = "", paragraph.startswith("- ")
        if section.startswith("Example") or re.search(r"^=+ +=+", paragraph, re.MULTILINE):
            text = paragraph
        elif paragraph.startswith("    ") and not section and not in_list:
            text = ".. code-block:: text\n\n" + paragraph  # a formula or a small table
        else:
            # A span of backquotes that a line break cuts in two is joined first.
            joined = re.sub(r"`[^`]+`", lambda span: re.sub(r"\n\s*", " ", span[0]), paragraph)
            text = "\n".join(_literal(line) for line in joined.split("\n"))
            # "num_classes: C." is no item of a list that begins with C.
            text = re.sub(r"^(\s+\w+: [A-Za-z])\.$", r"\1\\.", text, flags=re.MULTILINE)
        found += [*text.split("\n"), ""]
    return found


def _docstring(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = as_restructured_text(lines)


# ------------------------------------------------------------------------------------------------ pages
# Two pages are files of the root. Their links to docs/ are shortened; links to other files become names, as do those of
# the pages that leave docs/, since the site has no such files.
FROM_ROOT = {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
LINK = re.compile(r"\[([^\]]+)\]\((?!\w+://|#)([^)#]+)(#[^)]*)?\)")


def _page(app: Any, name: str, source: list[str]) -> None:
    text = (ROOT / FROM_ROOT[name]).read_text(encoding="utf-8") if name in FROM_ROOT else source[0]
    base = ROOT if name in FROM_ROOT else Path(app.srcdir, name).parent

    def link(found: re.Match[str]) -> str:
        target = (base / found[2]).resolve()
        if not target.is_relative_to(app.srcdir):
            return found[1] if found[1].startswith("`") else f"`{found[1]}`"
        inside = target.relative_to(app.srcdir) if name in FROM_ROOT else found[2]
        return f"[{found[1]}]({inside}{found[3] or ''})"

    source[0] = LINK.sub(link, text)


def setup(app: Any) -> None:
    """Connect the rewriting of docstrings, ahead of napoleon, and of pages."""
    app.connect("source-read", _page)
    app.connect("autodoc-process-docstring", _docstring, priority=100)
