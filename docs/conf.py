"""Sphinx configuration: `pip install -e '.[docs]' && sphinx-build -W docs docs/_build`."""

import kfac

project = "kfac"
author = "The kfac developers"
release = version = kfac.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
autodoc_typehints = "none"  # The docstrings say in words what a type would not.
autodoc_preserve_defaults = True
napoleon_use_ivar = True
nitpicky = True
# Types of attributes, which autodoc takes from the sources; there is no page about any of them.
nitpick_ignore_regex = [("py:.*", r"jax\..*|kfac\._.*")]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
root_doc = "contents"  # The table of contents, so that the pages stay plain Markdown.
exclude_patterns = ["_build"]
html_theme = "furo"
