"""Sphinx configuration of the documentation site: `make docs`.

The site has the repository's layout, so that the same links work in both. docs/README.md lists the pages in order. The
comment in docs/api.md names the objects whose docstrings become the reference.
"""

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

project = "csd_optim"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "hls_kernels/*.md"]
exclude_patterns = ["build", "csd_optim", "native", "tests", "bench", "**/build"]
html_theme = "furo"
html_title = project
html_copy_source = False

myst_heading_anchors = 4
default_role = "literal"  # of docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!csd_optim).*")]  # names of other packages: looking them up needs a network


def uri(page: Path) -> str:
    """Return Sphinx's name of a page."""
    return page.resolve().relative_to(ROOT).with_suffix("").as_posix()


def index() -> str:
    """Return the sidebar's table of contents. In docs/README.md, a bold line begins a part; each link is a page."""
    parts: list[tuple[str, list[str]]] = [("All pages", ["docs/README"])]
    page = (ROOT / "docs" / "README.md").read_text()
    for title, link in re.findall(r"^\*\*(.+)\*\*$|^\| \[.+?\]\((.+?)\.md\)", page, re.MULTILINE):
        if title:
            parts.append((title, []))
        else:
            parts[-1][1].append(uri(ROOT / "docs" / f"{link}.md"))
    listed = {page for _, pages in parts for page in pages}
    others = sorted(uri(page) for page in (ROOT / "docs").rglob("*.md"))  # linked from other pages only
    parts.append(("More", [*(page for page in others if page not in listed), "CHANGELOG"]))
    tables = (["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"] for title, pages in parts)
    return "\n\n".join("\n".join(table) for table in tables)


def read(app: Sphinx, name: str, source: list[str]) -> None:
    if name == root_doc:
        source[0] += "\n\n" + index()
    source[0] = re.sub(r"<!-- rst\n(.*?)-->", r"```{eval-rst}\n\1```", source[0], flags=re.DOTALL)


def done(app: Sphinx, failed: Exception | None) -> None:
    if not failed:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")  # the page that a web server shows first


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
    app.connect("build-finished", done)
