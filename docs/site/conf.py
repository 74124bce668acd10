"""The site that `make docs` builds: README, all pages, and the docstrings of all public names."""

import re
import tomllib
from os.path import normpath
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
PYTHON = "docs/site/python"  # the page of docstrings

project = "pycomm"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md", "benchmarks/README.md", f"{PYTHON}.rst"]
root_doc = "README"

html_theme = "furo"
html_title = f"pycomm {version}"
html_extra_path = ["index.html"]
html_show_sphinx = False
copybutton_prompt_text = "$ "

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
default_role = "code"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_use_rtype = False


def docstrings() -> str:
    """A page with the docstrings of the names that docs/reference/api.md lists."""
    import pycomm
    import pycomm.fsdp

    text = ["Docstrings", "=========="]
    seen: set[str] = set()
    for line in (ROOT / "docs/reference/api.md").read_text().splitlines():
        if line.startswith("## "):
            text += ["", line[3:], "-" * len(line)]
        for name in re.findall(r"`(pycomm\.[\w.]+)`", line.partition(" | ")[0]):
            if name in seen:
                continue
            seen.add(name)
            value: Any = pycomm
            for part in name.split(".")[1:]:
                value = getattr(value, part)
            if isinstance(value, type):
                text += ["", f".. autoclass:: {name}", "   :members:"]
            elif callable(value):
                text += ["", f".. autofunction:: {name}"]
    return "\n".join(text) + "\n"


def tables_of_contents() -> str:
    """The tables of docs/README.md, as the site's navigation."""
    text = ""
    for section in (ROOT / "docs/README.md").read_text().split("\n## ")[1:]:
        caption = section.partition("\n")[0]
        pages = [normpath(f"docs/{page}") for page in re.findall(r"\]\(([^)]*\.md)\)", section)]
        if caption == "Reference":
            pages.append(f"{PYTHON}.rst")
        lines = "\n".join(f"/{page}" for page in pages)
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"
    return text


def complete(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the navigation to the first page. Links to folders become text: the site has none."""
    here = (ROOT / docname).parent

    def shown(link: re.Match[str]) -> str:
        return link[1] if (here / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"\[([^]\[]+)\]\(([^)#:\s]+)\)", shown, source[0])
    if docname == root_doc:
        source[0] += "\n```{toctree}\n:hidden:\n\ndocs/README.md\n```\n" + tables_of_contents()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    Path(app.srcdir, f"{PYTHON}.rst").write_text(docstrings())
    app.connect("source-read", complete)
    app.connect("env-get-outdated", lambda *_: [root_doc])  # docs/README.md may have changed
