"""A page of texts, tables and figures: shown in a notebook piece by piece, then written as one file of HTML.

The file needs nothing outside of itself: figures are data: URIs, and there is no script. It knows no results.
"""

import base64
import html
import io
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import mistune
import pandas as pd
from matplotlib.figure import Figure

import specdec_lab
from specdec_lab import plots
from specdec_lab.errors import require_writable
from specdec_lab.provenance import commit
from specdec_lab.readings import as_markdown


@dataclass(frozen=True)
class Picture:
    """A figure, the name of its files, and what stands under it (Markdown)."""

    name: str
    figure: Figure
    said: str = ""


Piece: TypeAlias = str | pd.DataFrame | Picture  # Markdown, a table of texts, a figure

STYLE = """
:root { color-scheme: light dark; --ink: #1b1e23; --paper: #fff; --line: #d5d9df; --head: #f1f3f6; --soft: #59616c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --paper: #15181c; --line: #39404a; --head: #20252b; --soft: #a3acb8; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.25; } h2 { font-size: 1.3rem; margin-top: 2.6rem; }
p, ul { max-width: 56rem; }
.table { overflow-x: auto; margin: 1.2rem 0; }
table { border-collapse: collapse; font-size: 0.84rem; line-height: 1.4; font-variant-numeric: tabular-nums; }
th, td { padding: 0.32rem 0.65rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { background: var(--head); }
figure { margin: 1.4rem 0; } figcaption { max-width: 56rem; }
img { max-width: 100%; width: 54rem; background: #fff; padding: 0.6rem; border: 1px solid var(--line);
  border-radius: 6px; box-sizing: border-box; }
code { font-size: 0.9em; background: var(--head); padding: 0.1em 0.3em; border-radius: 4px; }
footer { margin-top: 3rem; color: var(--soft); font-size: 0.85rem; }
@media (max-width: 1200px) { table { font-size: 0.76rem; } th, td { padding: 0.3rem 0.4rem; } }
@media print { .table { overflow: visible; } h2, figure, tr { break-inside: avoid; } }
"""
# a browser that opens the page loads nothing and runs nothing, whatever a text holds
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class _Alone(mistune.HTMLRenderer):
    """Leaves out what would lead out of the page."""

    def link(self, text: str, url: str, title: str | None = None) -> str:
        return text

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return text


_html = mistune.create_markdown(renderer=_Alone(escape=True), plugins=["table"])


class Page:
    """Collects the pieces of a page under headings. figures: the folder that figures are saved in."""

    def __init__(self, title: str, figures: str | Path) -> None:
        self.title, self._figures = title, Path(figures)
        self._sections: list[tuple[str, tuple[Piece, ...]]] = []

    def add(self, heading: str, *pieces: Piece) -> None:
        """Show the pieces in the notebook, whose own cell has the heading, and keep them for `write`."""
        self._sections.append((heading, pieces))
        for piece in pieces:
            if isinstance(piece, Picture):
                plots.save(piece.figure, piece.name, self._figures)
                plots.show(piece.figure, piece.said)
            else:
                plots.tell(as_markdown(piece) if isinstance(piece, pd.DataFrame) else piece)

    def write(self, path: str | Path) -> Path:
        """Write the page; raises DataError where the file cannot be written."""
        path = Path(path)
        require_writable(path)
        path.write_text(self._document(), encoding="utf-8")
        return path

    def _document(self) -> str:
        body = [f"<h1>{html.escape(self.title)}</h1>"]
        for heading, pieces in self._sections:
            inside = "\n".join(_piece(piece, heading) for piece in pieces)
            body.append(f"<section>\n<h2>{html.escape(heading)}</h2>\n{inside}\n</section>")
        made = " ".join([f"specdec_lab {specdec_lab.__version__}", str(commit()["commit"])[:12]]).strip()
        body.append(f"<footer>Made by {made} on {datetime.now(UTC):%Y-%m-%d}.</footer>")
        head = [
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{html.escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
        ]
        lines = ['<!DOCTYPE html>\n<html lang="en">\n<head>', *head, "</head>\n<body>\n<main>", *body]
        return "\n".join([*lines, "</main>\n</body>\n</html>\n"])


def _piece(piece: Piece, heading: str) -> str:
    if isinstance(piece, pd.DataFrame):
        whole = as_markdown(piece)
        for sign in "…=→":  # what is around it stays on one line
            whole = whole.replace(f" {sign} ", f"\u00a0{sign}\u00a0")
        return f'<div class="table">{_html(whole)}</div>'
    if isinstance(piece, Picture):
        image = io.BytesIO()
        with plots.style():
            piece.figure.savefig(image, format="png", metadata={"Software": None})
        data = base64.b64encode(image.getvalue()).decode()
        picture = (
            f'<img alt="{html.escape(heading)}: figure {html.escape(piece.name)}" src="data:image/png;base64,{data}">'
        )
        return f"<figure>{picture}<figcaption>{_html(piece.said)}</figcaption></figure>"
    return str(_html(piece))
