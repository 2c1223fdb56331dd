"""The study of optimizers at large batches: it resumes, reports from what is stored, and refuses in one sentence."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "large_batch" / "study.py"


def study(*args, check=True, script=SCRIPT):
    """Runs the script in a process of its own: the flags that it sets for JAX are none of the other tests'."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run([sys.executable, script, *args], env=env, capture_output=True, text=True, check=False)
    if check:
        assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Results of a search that was stopped after two trials, then killed within a line, then went on."""
    folder = tmp_path_factory.mktemp("study")
    args = ("search", "--task", "toy", "--methods", "sgd", "--results", folder)
    study(*args, "--limit", "2")
    path = folder / "toy.jsonl"
    first = path.read_text()
    path.write_text(first + first[:50])
    study(*args)
    return folder, first


def test_a_killed_search_goes_on_where_it_was(searched):
    folder, first = searched
    text = (folder / "toy.jsonl").read_text()
    assert first.count("\n") == 2
    assert text.startswith(first)
    records = [json.loads(line) for line in text.splitlines()]
    keys = [json.dumps([r["method"], r["settings"], r["steps"], r["seed"]], sort_keys=True) for r in records]
    assert len(set(keys)) == len(keys)
    # The grid of six, rates beyond its edges, and the two best once more.
    assert len(records) >= 8
    assert {r["steps"] for r in records} == {2, 4}
    assert all(len(r["losses"]) == r["steps"] for r in records if r["finite"])


def test_the_report_comes_from_what_is_stored(searched, tmp_path):
    folder, _ = searched
    printed = study("report", "--task", "toy", "--results", folder, "--figures", tmp_path).stdout
    assert "**Search (not finished)**" in printed
    assert "Nesterov SGD" in printed
    assert (tmp_path / "large_batch_toy_curves.svg").is_file()


WRONG = [
    (["search", "--methods", "adagrad"], "--methods adagrad is none of sgd, "),
    (["search", "--limit", "0"], "--limit must be at least 1"),
    (["search", "--data-dir", "nowhere"], "--data-dir nowhere is not a folder"),
    (["batch-sizes", "--task", "toy", "--parts", "3"], "--parts 3 is none of 4, 50, 200"),
    (["report", "--results", "nowhere"], "holds no trials"),
    (["time", "--task", "toy", "--results", "nowhere"], "the search of sgd is not done"),
    (["dance"], "dance"),
]


def test_what_is_wrong_is_said_in_one_sentence():
    script = """
import json, sys
import study
from files import UserError
for args in json.loads(sys.argv[1]):
    try:
        study.main(args)
    except UserError as error:
        print(str(error).replace(chr(10), "<newline>"))
"""
    args = json.dumps([args for args, _ in WRONG])
    done = subprocess.run([sys.executable, "-c", script, args], cwd=SCRIPT.parent, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(WRONG), done.stderr
    for line, (_, message) in zip(lines, WRONG, strict=True):
        assert message in line
        assert "<newline>" not in line


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "toy.jsonl").write_text('{"task": 1}\n{}\n')
    done = study("report", "--task", "toy", "--results", tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "toy.jsonl, line 1, is no trial" in done.stderr


def test_the_budget_that_reaches_the_target_is_interpolated():
    script = """
import study, reporting
group = lambda steps, *scores: [{"steps": steps, "val_accuracy": x} for x in scores]
print(reporting.crossing([group(40, 0.4, 0.4), group(90, 0.6, 0.6)], 0.5))
print(reporting.crossing([group(40, 0.4, 0.4)], 0.5))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=SCRIPT.parent, capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, second = (json.loads(line.replace("inf", "Infinity").replace("(", "[").replace(")", "]"))
                     for line in done.stdout.splitlines())  # fmt: skip
    assert first == pytest.approx([60, 0])
    assert second == [math.inf, 40.0]


def test_the_networks_are_trained_once_with_a_method_and_a_rate(tmp_path):
    script, results = SCRIPT.with_name("networks.py"), tmp_path / "networks.jsonl"
    args = ("--networks", "character transformer", "--steps", "3", "--rates", "0.03", "--results", results)
    args += ("--methods", "kfac", "soap", "muon")
    study("run", *args, script=script)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(records) == 3 and all(math.isfinite(record["score"]) for record in records)
    assert not study("run", *args, script=script).stdout
    stored = study("report", script=script).stdout
    assert re.search(r"\n  kfac-cholesky  .* 0.06: 0.4956 ", stored)
