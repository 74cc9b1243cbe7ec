"""The index page over the runs: one HTML file with its style and figures inside."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path
from typing import Any

from samplex_cuda.reproduce import report

__all__ = ["page"]

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d8dee4; --back: #fff; --band: #f6f8fa;
  --good: #0f766e; --bad: #be123c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4ae; --line: #3d444d; --back: #0d1117;
  --band: #161b22; --good: #2dd4bf; --bad: #fb7185; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; color: var(--ink); background: var(--back);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { margin-top: 3rem; border-top: 2px solid var(--line); padding-top: 1rem; }
h3 { margin: 2rem 0 .4rem; font-size: 1.05rem; }
p.soft, figcaption, .note { color: var(--soft); font-size: .9rem; }
nav a { display: inline-block; margin: 0 .9rem .3rem 0; }
a { color: inherit; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { background: var(--band); } td.n { text-align: right; font-variant-numeric: tabular-nums; }
td.yes { color: var(--good); font-weight: 600; } td.no { color: var(--bad); font-weight: 600; }
figure { margin: .5rem 0; } img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
code { background: var(--band); padding: .1em .3em; border-radius: 3px; }
@media (max-width: 34rem) {
  table.claims thead { display: none; }
  table.claims, table.claims tbody, table.claims tr, table.claims td { display: block; }
  table.claims tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  table.claims td { border: 0; padding: .1rem 0; }
  table.claims td[data-of]::before { content: attr(data-of) ": "; color: var(--soft); font-weight: 400; }
}
"""


def _inline(text: str) -> str:
    """`code`, **bold** and [links](to) of one line of Markdown."""
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"\[([^\]]+)\]\((https?://[^)\s]+)\)", r'<a href="\2">\1</a>', text)


def _blocks(markdown: str) -> str:
    """Paragraphs, lists and headings."""
    made = []
    for block in re.split(r"\n\s*\n", markdown.strip()):
        lines = block.splitlines()
        if all(line.startswith(("- ", "  ")) for line in lines):
            items = re.split(r"^- ", block, flags=re.MULTILINE)[1:]
            made.append("<ul>" + "".join(f"<li>{_inline(' '.join(i.split()))}</li>" for i in items) + "</ul>")
        elif lines[0].startswith("#"):
            made.append(f"<h3>{_inline(lines[0].lstrip('# '))}</h3>")
            made += [_blocks("\n".join(lines[1:]))] if lines[1:] else []
        else:
            made.append(f"<p>{_inline(' '.join(lines))}</p>")
    return "\n".join(made)


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{_inline(column)}</th>" for column in columns)
    body = []
    for row in rows:
        cells = []
        for cell in row:
            kind = ' class="n"' if isinstance(cell, int | float) and not isinstance(cell, bool) else ""
            cells.append(f"<td{kind}>{_inline(report._show(cell))}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    rows_text = "\n".join(body)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{rows_text}\n</tbody></table></div>'


def _claims(claims: list[dict[str, Any]]) -> str:
    rows = []
    for c in claims:
        word = {None: "\u2013", True: "yes", False: "no"}[c["holds"]]
        kind = "open" if c["holds"] is None else word
        note = f'<br><span class="note">{_inline(c["note"])}</span>' if c["note"] else ""
        rows.append(
            f"<tr><td><strong>{_inline(c['name'])}</strong></td>"
            f'<td data-of="the paper says">{_inline(c["paper"])}</td>'
            f'<td data-of="measured here">{_inline(c["measured"])}{note}</td>'
            f'<td data-of="holds" class="{kind}">{word}</td></tr>'
        )
    head = "<thead><tr><th></th><th>the paper says</th><th>measured here</th><th>holds</th></tr></thead>"
    return f'<div class="wide"><table class="claims">{head}<tbody>\n' + "\n".join(rows) + "\n</tbody></table></div>"


def _figure(folder: Path, part: dict[str, Any]) -> str:
    path = folder / Path(part["file"]).name
    if not path.is_file():
        return f"<h3>{_inline(part['title'])}</h3><p class='soft'>{html.escape(path.name)} is not there.</p>"
    code = base64.b64encode(path.read_bytes()).decode()
    name = html.escape(part["title"])
    caption = f"<figcaption>{_inline(part['caption'])}</figcaption>" if part["caption"] else ""
    return (
        f"<h3>{_inline(part['title'])}</h3>"
        f'<figure><img alt="{name}" src="data:image/png;base64,{code}">{caption}</figure>'
    )


def _paper(folder: Path, found: dict[str, Any]) -> str:
    held = [c["holds"] for c in found["claims"] if c["holds"] is not None]
    made = [
        f'<section id="{html.escape(found["name"])}">',
        f"<h2>{_inline(found['title'])}</h2>",
        f"<p>{_inline(found['paper'])}</p>",
        f'<p class="soft"><code>samplex reproduce {html.escape(found["name"])}</code>. {_inline(report._facts(found))} '
        f"{sum(held)} of {len(held)} statements hold here.</p>",
        *([f"<p><strong>{html.escape(report.TOY)}</strong></p>"] if found.get("size") == "quick" else []),
        _claims(found["claims"]),
    ]
    for part in found["parts"]:
        if part["kind"] == "text":
            made.append(_blocks(part["text"]))
        elif part["kind"] == "table":
            made += [f"<h3>{_inline(part['title'])}</h3>", _table(part["columns"], part["rows"])]
            made += [f'<p class="note">{_inline(part["note"])}</p>'] if part["note"] else []
        else:
            made.append(_figure(folder, part))
    made.append("<h3>Deviations, and errors of the paper that are corrected</h3>")
    made.append("<ul>" + "".join(f"<li>{_inline(text)}</li>" for text in found["deviations"]) + "</ul>")
    return "\n".join([*made, "</section>"])


def page(found: list[tuple[Path, dict[str, Any]]]) -> str:
    """The page over (run folder, its results.json), in this order.

    Example:
        >>> from samplex_cuda.reproduce.page import page
        >>> page([]).splitlines()[0]
        '<!doctype html>'
    """
    links = "".join(f'<a href="#{html.escape(one["name"])}">{html.escape(one["name"])}</a>' for _, one in found)
    body = "\n".join(_paper(folder, one) for folder, one in found) or "<p>No run is here yet.</p>"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>samplex reproduce</title>
<style>{STYLE}</style>
</head>
<body>
<h1>What the papers say, and what was measured here</h1>
<nav>{links}</nav>
{body}
</body>
</html>
"""
