"""Test that no link is broken in README.md, CONTRIBUTING.md, CHANGELOG.md, and the pages of docs, examples and tests.

A link is broken if its file, page or heading does not exist. Web addresses are not opened. Addresses of files in this
repository are checked like the files.
"""

import functools
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
SUFFIXES = (".md", ".rst", ".ipynb")
HEADING_LEVELS = 3  # the levels of headings with an anchor on the pages of docs: myst_heading_anchors in docs/conf.py

CODE_BLOCK = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1[`~]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
BRACKETS = r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]"
MARKDOWN_LINKS = (
    re.compile(r"\]\(<?([^()\s<>]+)>?(?: +\"[^\"]*\")?\)"),
    re.compile(r"^\[[^\]^]+\]: *<?([^\s<>]+)>?", re.MULTILINE),
    re.compile(r"<(?:a|img|source)\s[^>]*?(?:href|src|srcset)=\"([^\"]+)\""),
)


def pages(root=ROOT):
    found = list(root.glob("*.md"))
    for folder in ("docs", "examples", "tests"):
        found += [path for path in (root / folder).rglob("*") if path.suffix in SUFFIXES and "_build" not in path.parts]
    return sorted(found)


@functools.cache
def prose(page):
    """Return a page without its code blocks."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell) for cell in cells)
    return text if page.suffix == ".rst" else CODE_BLOCK.sub("", text)


def markdown_links(page):
    text = CODE.sub("code", prose(page))
    return [target for pattern in MARKDOWN_LINKS for target in pattern.findall(text)]


def rst_links(page):
    """Return the files and pages that a reStructuredText page names, each page with its suffix."""
    text = prose(page) + "\n"
    targets = re.findall(r"^\.\. (?:image|figure|include|literalinclude):: (\S+)$", text, re.MULTILINE)
    targets += re.findall(r"`[^`<]*<([^`<>]+)>`_", text)
    documents = re.findall(r":doc:`(?:[^`<]*<)?([^`<>]+)>?`", text)
    for tree in re.findall(r"^\.\. toctree::\n((?:   .*\n| *\n)*)", text, re.MULTILINE):
        entries = [line.strip() for line in tree.splitlines()]
        documents += [re.sub(r".*<(.*)>", r"\1", entry) for entry in entries if entry and not entry.startswith(":")]
    for document in documents:
        suffixes = [suffix for suffix in SUFFIXES if place(page, document + suffix).exists()]
        targets.append(document + (suffixes[0] if suffixes else ".rst"))
    return targets


def slug(heading):
    """Return the anchor that GitHub and MyST derive from a heading."""
    text = re.sub(rf"!?{BRACKETS}\([^()]*\)", r"\1", heading.strip())
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@functools.cache
def anchors(page):
    """Return the anchors to which a link to this page can lead."""
    text, found = prose(page), set()
    if page.suffix == ".rst":
        titles = re.findall(r"^(\S.*)\n(?:={3,}|-{3,}|~{3,})$", text, re.MULTILINE)
        return {slug(title) for title in titles} | set(re.findall(r"^\.\. _(.+):$", text, re.MULTILINE))
    for marks, heading in re.findall(r"^(#{1,6}) +(.+)$", text, re.MULTILINE):
        if len(marks) > HEADING_LEVELS and "docs" in page.parts:
            continue
        anchor, number = slug(heading), 0
        while anchor in found:
            number += 1
            anchor = f"{slug(heading)}-{number}"
        found.add(anchor)
    found |= set(re.findall(r"^\((\S+)\)=$", text, re.MULTILINE))
    return found | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def place(page, path):
    """Return the file to which a relative path leads; in docs, Sphinx reads a leading slash as its source folder."""
    return (ROOT / "docs" / path[1:] if path.startswith("/") else page.parent / path).resolve()


def why_broken(page, target, root=ROOT):
    """Return the reason why a link of a page leads nowhere, or None."""
    in_repository = re.fullmatch(re.escape(REPOSITORY) + r"/(?:blob|tree|raw)/[^/#]+/(.*)", target)
    if not in_repository and re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    path, _, anchor = (in_repository[1] if in_repository else target).partition("#")
    file = page
    if path:
        file = (root / path).resolve() if in_repository else place(page, path)
    if not file.exists():
        return "no such file"
    if file != root and root not in file.parents:
        return "outside the repository"
    if anchor and file.suffix in SUFFIXES and anchor not in anchors(file):
        return "no such heading"
    return None


def broken_links(page, root=ROOT):
    """Return a line for each broken link of a page."""
    links = rst_links(page) if page.suffix == ".rst" else markdown_links(page)
    reasons = [(link, why_broken(page, link, root)) for link in links]
    return [f"{page.relative_to(root)}: {link}: {reason}" for link, reason in reasons if reason]


def test_no_link_is_broken():
    names = {str(page.relative_to(ROOT)) for page in pages()}
    assert {"README.md", "docs/index.rst", "docs/api/kfac.rst", "docs/notebooks/digits.ipynb"} <= names
    broken = [line for page in pages() for line in broken_links(page)]
    assert not broken, "\n".join(broken)


MARKDOWN = """# A page

## Rates, `damping` & [more](other.md)

```
[in code](nowhere.md)
```

Also `[in code](nowhere.md)`. {link}
"""


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("[a](other.md), [b](other.md#second), [c](#rates-damping--more), ![d](picture.svg)", None),
        ("[a](https://example.com/nowhere.md)", None),
        (f"[a]({REPOSITORY}/blob/main/docs/other.md#second)", None),
        (f"[a]({REPOSITORY}/blob/main/docs/nowhere.md)", "no such file"),
        ("[a [nested] text](nowhere.md)", "no such file"),
        ("![a](nowhere.svg)", "no such file"),
        ("[a]\n\n[a]: nowhere.md", "no such file"),
        ('<img src="nowhere.svg">', "no such file"),
        ("[a](other.md#third)", "no such heading"),
        ("[a](#in-code)", "no such heading"),
        ("[a](../../../outside.md)", "no such file"),
    ],
)
def test_broken_links_of_markdown_are_found(tmp_path, link, reason):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "other.md").write_text("# Other\n\n## Second\n")
    (folder / "picture.svg").touch()
    page = folder / "page.md"
    page.write_text(MARKDOWN.format(link=link))
    broken = broken_links(page, tmp_path)
    assert [line.rpartition(": ")[2] for line in broken] == ([reason] if reason else [])
    notebook = {"cells": [{"cell_type": "markdown", "source": page.read_text().splitlines(keepends=True)}]}
    (folder / "page.ipynb").write_text(json.dumps(notebook))
    assert len(broken_links(folder / "page.ipynb", tmp_path)) == len(broken)


def test_broken_links_of_restructured_text_are_found(tmp_path):
    (tmp_path / "there.md").touch()
    page = tmp_path / "index.rst"
    page.write_text(
        "Title\n=====\n\n:doc:`there`, :doc:`text <nowhere>`\n\n.. image:: nowhere.png\n\n"
        ".. toctree::\n   :maxdepth: 1\n\n   there\n   missing\n"
    )
    assert broken_links(page, tmp_path) == [
        "index.rst: nowhere.png: no such file",
        "index.rst: nowhere.rst: no such file",
        "index.rst: missing.rst: no such file",
    ]


@pytest.fixture
def outside(monkeypatch):
    """Return the extension that rewrites links in the built pages."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs" / "extensions"), *sys.path])
    import outside

    return outside


@pytest.mark.parametrize(
    ("page", "link", "address"),
    [
        ("page.md", "[a](../examples/physics/README.md#run)", "blob/main/examples/physics/README.md#run"),
        ("page.md", "[a](../examples/physics)", "tree/main/examples/physics"),
        ("notebooks/page.ipynb", "[a](../../CHANGELOG.md)", "blob/main/CHANGELOG.md"),
        ("page.md", "[a [b] `c`](../tests/soak.py)", "blob/main/tests/soak.py"),
        ("page.md", "[a](other.md#heading)", None),
        ("notebooks/page.ipynb", "[a](../curvature.md)", None),
        ("api/page.md", "[a](../../docs/curvature.md)", None),
        ("page.md", "![a](../examples/large_batch/results/picture.svg)", None),
        ("page.md", "[a](https://example.com/../x.md) and [b](#heading)", None),
    ],
)
def test_built_pages_link_to_the_repository(outside, page, link, address):
    found = outside.to_repository(link, page, REPOSITORY, lambda path: (ROOT / path).is_dir())
    if address is None:
        assert found == link
    else:
        assert found == re.sub(r"\([^()]*\)$", f"({REPOSITORY}/{address})", link)
