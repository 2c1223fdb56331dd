"""Links from Markdown pages and notebooks to files outside docs/: they lead to the repository's web address.

A page links to such a file by its relative path, `../examples/physics/README.md`, so that the link also works in a
checkout. Sphinx would copy the file and offer it for download. Pictures keep their paths, because pages embed them.
"""

import posixpath
import re

# A link's text may contain one level of brackets. The text of a picture is preceded by an exclamation mark.
LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()([^()\s#]+)(#[^()\s]*)?(?=\))")
BRANCH = "main"


def to_repository(text, page, repository, is_folder):
    """Replace relative links that leave docs/ in the source text of `page`, a path relative to docs/."""
    folder = posixpath.join("docs", posixpath.dirname(page))

    def replace(link):
        picture, before, target, anchor = link.groups()
        if picture or ":" in target or target.startswith("/"):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return link[0]
        view = "tree" if is_folder(path) else "blob"
        return f"{before}{repository}/{view}/{BRANCH}/{path}{anchor or ''}"

    return LINK.sub(replace, text)


def _source_read(app, name, source):
    page = app.env.doc2path(name, base=False)
    root = app.srcdir.parent
    source[0] = to_repository(
        source[0],
        str(page),
        app.config.repository_url,
        lambda path: (root / path).is_dir(),
    )


def setup(app):
    app.add_config_value("repository_url", "", "env", str)
    app.connect("source-read", _source_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
