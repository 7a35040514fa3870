"""How the documentation is built: `make docs`."""

from __future__ import annotations

import importlib.metadata

project = "embens"
author = "the embens authors"
release = importlib.metadata.version("embens")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["_build", "gallery/GALLERY_HEADER.rst"]
suppress_warnings = ["toc.not_included"]  # the page of claims is made by a command, and linked

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes and types are in the signatures and in the text
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"embens {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": ".*",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1000,
    "write_computation_times": False,
}


def make_explorer(app) -> None:
    """Make the page of the explorer, once for each version of what it shows."""
    from pathlib import Path

    from embens.report import explorer

    here = Path(app.srcdir) / "_static" / "explorer.html"
    sources = [Path(explorer.__file__), Path(explorer.__file__).with_suffix(".html")]
    if not here.exists() or here.stat().st_mtime < max(s.stat().st_mtime for s in sources):
        explorer.write(here)


def setup(app) -> None:
    """Connect what is made when the documentation is built."""
    app.connect("builder-inited", make_explorer)
