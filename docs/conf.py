"""Settings of the documentation site, which `make docs` builds.

Sphinx is the builder because it checks what the others do not: with `nitpicky` and warnings as errors a missing page,
heading or documented name ends the build, and the pages of the API come from the docstrings of the installed package.

The source folder is the root of the repository, so that a link of a page leads to the same file on the site, in the
repository and on a forge.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, Never

import typer

import equivtest

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "equivtest"
author = "the authors of equivtest"
version = release = equivtest.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md", "findings/*.md", "studies/results/*.md", "properties/README.md", "README.md", "ARCHITECTURE.md",
    "CONTRIBUTING.md", "CHANGELOG.md", "examples/reports/README.md",
]  # fmt: skip
exclude_patterns = [".*", "**/.*", "build", "dist", "report", "equivtest", "tests"]

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 4
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_attr_annotations = False

nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|collections|pathlib|contextlib|abc|typing)\..*")]

html_theme = "furo"
html_title = "equivtest"
html_static_path: list[str] = []
html_show_sourcelink = False
html_show_copyright = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"


FOCUSABLE_BLOCKS = """
addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("pre")) if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
});
"""
"""Lets the keyboard scroll blocks that are wider than the page."""

COMMANDS = "<!-- the site lists the commands here -->"


def undocumented_parameters(function: Any) -> list[str]:
    """Returns the parameters of a function that its docstring does not describe."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    described = re.findall(r"^\s+([\w, *]+):", inspect.getdoc(function) or "", flags=re.M)
    names = {name.strip(" *") for line in described for name in line.split(",")}
    unknown = [each for each in parameters if each.annotation not in ("Never", Never)]
    return [each.name for each in unknown if each.name not in {*names, "self"}]


def commands() -> str:
    """Returns the command line as Markdown: each command with its arguments and options."""
    from equivtest.cli import app

    group: Any = typer.main.get_command(app)
    return "\n".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    rows = [
        f"| {_spelled(each)} | {' '.join((each.help or '').split()).replace('|', ' or ')} |"
        for each in command.params
        if each.name != "help"
    ]
    table = ["| argument | meaning |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## equivtest {name}", "", command.help or "", "", *table, ""])


def _spelled(parameter: Any) -> str:
    return ", ".join(f"`{each}`" for each in parameter.opts) if parameter.opts[0].startswith("-") else parameter.name


def setup(app: Sphinx) -> None:
    """Writes the commands into their page, and warns if a parameter of the API is not described."""
    from sphinx.util import logging

    logger = logging.getLogger("equivtest.docs")

    def check(_app: Sphinx, what: str, name: str, documented: Any, _options: Any, _lines: list[str]) -> None:
        missing = undocumented_parameters(documented) if what in ("function", "class") else []
        if missing:
            logger.warning("%s: parameters without a description: %s", name, ", ".join(missing))

    def fill(_app: Sphinx, page: str, source: list[str]) -> None:
        if page == "docs/reference/cli":
            source[0] = source[0].replace(COMMANDS, commands())

    app.add_js_file(None, body=FOCUSABLE_BLOCKS)
    app.connect("autodoc-process-docstring", check)
    app.connect("source-read", fill)
