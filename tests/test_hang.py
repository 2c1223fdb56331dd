"""Inversions on several simulated devices do not wait for each other's threads."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "hang.py"


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_two_simulated_devices_come_to_an_end(attempt):
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, timeout=180)
    assert result.stdout == "failed inversions: 0\n"
