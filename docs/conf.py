"""Sphinx configuration: `pip install -e '.[docs]' && sphinx-build -W docs docs/_build`."""

import pathlib
import sys
import tomllib

import kfac

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE / "extensions"))

project = "kfac"
author = copyright = "The kfac developers"
release = version = kfac.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
extensions += ["mathml", "outside", "type_names"]  # in docs/extensions
project_table = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
repository_url = project_table["urls"]["Repository"]
autosummary_generate = False  # the tables of api/index.rst, no page for each name
html_math_renderer = "mathml"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 110  # longer ones have a line per argument
autodoc_preserve_defaults = True
napoleon_use_ivar = True
nitpicky = True
# Types in signatures and of attributes; there is no page about any of them.
_elsewhere = r"(jax|numpy|optax|collections)\..*|kfac\.(\w+\.)?_.*|ScalarOrSchedule|BlockState|KfacMetrics|Owned"
_elsewhere += "|MomentumState|Settings|Params|Solution|ArrayLike|Array"
nitpick_ignore_regex = [("py:.*", _elsewhere)]
default_role = "code"  # docstrings quote code by single backticks
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # notebooks are stored without their results
nb_execution_raise_on_error = True
nb_execution_timeout = 300
root_doc = "index"
exclude_patterns = ["_build", "extensions"]
html_theme = "furo"
html_theme_options = {
    "source_repository": repository_url,  # a link to each page's source
    "source_branch": "main",
    "source_directory": "docs/",
    "footer_icons": [
        {"name": "Repository", "url": repository_url, "html": "Repository", "class": ""}
    ],
}
copybutton_exclude = ".linenos, .gp, .go"  # prompts and output stay behind
html_static_path = ["_static"]
html_logo = html_favicon = "_static/logo.svg"  # a matrix near its block diagonal
html_css_files = ["pages.css"]
