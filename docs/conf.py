"""Configuration of the documentation, which `make docs` builds."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

project = "embens"
author = "the embens authors"
release = importlib.metadata.version("embens")
copyright = f"2026 the embens authors, MIT License. Version {release}"
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
suppress_warnings = ["toc.not_included"]  # claims.md is generated and only linked

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes and types are in the signatures and in the text
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes as fields: no second entry for those of dataclasses
napoleon_attr_annotations = False  # shapes in annotations are not reStructuredText

html_theme = "furo"
html_title = f"embens {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "source_repository": "https://github.com/embens/embens",
    "source_branch": "main",
    "source_directory": "docs/",
    "footer_icons": [
        {
            "name": "Source code",
            "url": "https://github.com/embens/embens",
            "html": '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2">'
            '<path d="M8 6 2 12l6 6M16 6l6 6-6 6"></path></svg>',
            "class": "",
        },
    ],
}
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


def write_explorer(app, exception) -> None:
    """Write the page that docs/explorer.md shows in a frame."""
    from reproduction.report import explorer

    if exception is None and app.builder.name == "html":
        explorer.write(Path(app.outdir) / "_static" / "explorer.html")


def setup(app) -> None:
    """Compute the explorer after the other pages are built."""
    app.connect("build-finished", write_explorer)
