"""Sphinx configuration: `pip install -e '.[docs]' && sphinx-build -W docs docs/_build`."""

import pathlib
import sys

import kfac

sys.path.insert(0, str(pathlib.Path(__file__).parent / "extensions"))

project = "kfac"
author = "The kfac developers"
release = version = kfac.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml"]
html_math_renderer = "mathml"
autodoc_typehints = "none"  # The docstrings say in words what a type would not.
autodoc_preserve_defaults = True
napoleon_use_ivar = True
nitpicky = True
# Types of attributes, which autodoc takes from the sources; there is no page about any of them.
nitpick_ignore_regex = [("py:.*", r"jax\..*|kfac\._.*")]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
root_doc = "contents"  # The table of contents, so that the pages stay plain Markdown.
exclude_patterns = ["_build", "extensions"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
