"""Sphinx configuration: `pip install -e '.[docs]' && sphinx-build -W docs docs/_build`."""

import kfac

project = "kfac"
author = "The kfac developers"
release = version = kfac.__version__

extensions = ["myst_parser", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
root_doc = "contents"  # The table of contents, so that the pages stay plain Markdown.
exclude_patterns = ["_build"]
html_theme = "furo"
