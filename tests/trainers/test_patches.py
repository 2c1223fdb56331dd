"""Test that the patches in `examples/trainers` are as short as examples/trainers/PATCHES.md says."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "trainers"


def test_the_maxtext_patch_changes_as_many_lines_as_the_pages_say():
    lines = (FOLDER / "maxtext-0.2.5.patch").read_text().splitlines()
    changed = [line for line in lines if line[:1] in "+-" and not line.startswith(("+++ ", "--- "))]
    assert len(changed) <= 60
    [new] = (int(count) for line in lines for count in re.findall(r"^@@ -0,0 \+1,(\d+) @@", line))
    for page in (FOLDER / "PATCHES.md", FOLDER / "MAXTEXT.md"):
        assert f"changes {len(changed)} lines" in page.read_text(), page
    assert f"of which {new} are a new file" in (FOLDER / "PATCHES.md").read_text()
