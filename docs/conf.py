"""The site: `make docs` builds it from README.md, docs/ and results/; nothing is fetched, neither then nor by its readers.

Sphinx reads from the root of the repository, so that a link is written once and works there and here.
"""

from __future__ import annotations

from pathlib import Path

import revode

project = "revode"
copyright = "the authors of revode, MIT licence"
release = version = revode.__version__
root_doc = "README"
include_patterns = ["README.md", "docs/**.md", "results/**.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = ["docs/site"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3  # the anchors that GitHub gives

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"exclude-members": "extra_repr"}
napoleon_use_ivar = True
default_role = "py:obj"
add_module_names = False
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = "revode"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_extra_path = ["site/index.html"]  # leads to README.html
html_show_search_summary = False  # it would fetch every page found, which browsers refuse for files
html_show_sourcelink = False
html_copy_source = False


def plain_text(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are for readers of source: |x| is a norm, and the tables of a module's docstring are not for the site."""
    lines[:] = [] if what == "module" else [line if "``" in line else line.replace("|", r"\|") for line in lines]


def add_contents(app, page: str, source: list[str]) -> None:
    """The first page is README.md, which holds no list of contents for Sphinx."""
    if page == root_doc:
        source[0] += (Path(__file__).parent / "site" / "contents.md").read_text()


def setup(app) -> None:
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", plain_text)
