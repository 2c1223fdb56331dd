"""Links to Markdown outside of the documentation, beside the examples: Sphinx hands out the file, as it does others."""

import re


def _as_files(app, name, source):
    source[0] = re.sub(r"\]\((\.\./[^)#]*\.md)(?:#[^)]*)?\)", r"](path:\1)", source[0])


def setup(app):
    app.connect("source-read", _as_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
