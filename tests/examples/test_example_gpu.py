"""Test the GPU programmes: their options, their records, their timings, and their training text."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

import gpu
import gpu_speed
import gpu_text
import gpu_variants
import steps
from gpu_record import Record, page

pytestmark = pytest.mark.examples


def test_a_row_that_fails_leaves_the_others(tmp_path):
    def fails():
        raise RuntimeError("no such kernel")

    record = Record(tmp_path, "A", 1.0, None, "a command")
    assert record.measure("Times", "muon", lambda: {"ms": 1.5})
    assert not record.measure("Times", "sgd", fails)
    assert not record.measure("Times", "adamw", lambda: {"ms": 2.0}, needs=1e6)
    found = json.loads((tmp_path / "A.json").read_text())
    assert found["tables"] == {"Times": {"muon": {"ms": 1.5}}}
    assert list(found["to repeat"]) == ["Times: sgd", "Times: adamw"]
    text = page(found)
    assert "| muon | 1.5 |" in text and "RuntimeError: no such kernel" in text


def test_an_earlier_file_is_kept(tmp_path):
    for ms in (1.0, 2.0):
        Record(tmp_path, "A", 1.0, None, "").add("Times", "muon", {"ms": ms})
    assert json.loads((tmp_path / "A.before.json").read_text())["tables"] == {"Times": {"muon": {"ms": 1.0}}}


@pytest.mark.parametrize(
    "wrong",
    [
        ("--programme", "E", "--runs", "kfac"),
        ("--programme", "E", "--runs", "adam:0.1"),
        ("--programme", "E", "--runs", "kfac:0.1,table=0.3"),
        ("--programme", "E", "--runs", "muon:0.1,tables=0.3"),
        ("--programme", "E", "--runs", "kfac:0.1,momentum=1.5"),
        ("--programme", "E", "--runs", "kfac:0.1,split=1,orthogonal=1"),
        ("--programme", "B", "--runs", "kfac:0.1,interval=4"),
        ("--programme", "F", "--batches", "60000"),
        ("--programme", "A", "--steps", "100"),
        ("--have", "nowhere"),
        ("--vocabulary", "nowhere.npz"),
        ("--minutes", "0"),
    ],
)
def test_parse_refuses_wrong_options_before_anything_starts(wrong, capsys):
    with pytest.raises(SystemExit):
        gpu.parse([*wrong])
    assert wrong[-2] in capsys.readouterr().err


def test_rows_of_an_earlier_call_are_not_measured_again(tmp_path):
    Record(tmp_path / "first", "A", 1.0, None, "").add("Times", "muon", {"ms": 1.5})
    record = Record(tmp_path / "second", "A", 1.0, tmp_path / "first", "")
    assert record.measure("Times", "muon", lambda: pytest.fail("measured again"))
    assert record.row("Times", "muon") == {"ms": 1.5}


def test_the_curve_of_a_run_is_saved_before_it_ends(tmp_path):
    record = Record(tmp_path, "E", 1.0, None, "")
    record.keep("kfac:0.1", [[10, 4.5]])
    assert json.loads((tmp_path / "E.json").read_text())["unfinished"] == {"kfac:0.1": [[10, 4.5]]}
    record.keep("kfac:0.1", [])
    assert json.loads((tmp_path / "E.json").read_text())["unfinished"] == {}


def test_run_in_turn_names_missing_images_and_shows_the_rows_there(tmp_path, capsys):
    output = ["--output", str(tmp_path), "--scratch", str(tmp_path), "--minutes", "0.001"]
    Record(tmp_path, "F", 1.0, None, "a command").add("Times", "muon", {"ms": 1.5})
    assert gpu.main([*output, "--programme", "F", "E"]) == 2
    said = capsys.readouterr().out
    assert "cifar10-1.npz is missing" in said and "E does not run" in said
    assert "| muon | 1.5 |" in (tmp_path / "gpu.md").read_text()


def test_check_names_missing_images(tmp_path, capsys):
    assert gpu.main(["--check", "--scratch", str(tmp_path)]) == 0
    assert "MISSING" in capsys.readouterr().out


def test_the_limit_ends_the_process_and_says_what_was_cut_off(tmp_path):
    program = (
        "import pathlib, sys, time; from gpu_record import Record\n"
        "record = Record(pathlib.Path(sys.argv[1]), 'B', 0.01, None, ''); record.end_at_limit()\n"
        "record.measure('Times', 'slow', lambda: time.sleep(60))"
    )
    code = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=Path(gpu.__file__).parent, timeout=30
    ).returncode
    assert code == 3
    assert "Times: slow: cut off" in json.loads((tmp_path / "B.json").read_text())["to repeat"]


def test_a_table_of_milliseconds(tmp_path):
    options = gpu.parse(["--programme", "A", "--rehearse", "--rows", "sgd", "--output", str(tmp_path)])
    record = Record(tmp_path, "A", 5.0, None, "")
    made = gpu_speed.time_steps(record, "gpt-124m", options)
    assert record.row("gpt-124m, milliseconds", "sgd")["ms"] > 0
    gpu_speed.profile(record, "gpt-124m", "sgd", made["sgd"])
    assert len(record.found["tables"]["gpt-124m, sgd: the ten longest kernels"]) == 10
    assert not record.found["to repeat"]


@pytest.mark.parametrize("row", ["without", "statistics", "observe", "refresh"])
def test_make_step_of_every_row_with_kfac(row):
    task = steps.task("gpt-124m", argparse.Namespace(small=True, batch=None, image_size=224))
    settings = argparse.Namespace(devices=1, preconditioner="soap", refresh="apart", inverse_update_period=100)
    step, tx = steps.make_step(row, task, settings)
    state = jax.eval_shape(tx.init, task.params)
    params, _, _ = jax.eval_shape(step, task.params, state, task.batch)
    assert jax.tree.structure(params) == jax.tree.structure(task.params)


def test_kernels_and_gaps(tmp_path):
    product = jax.jit(lambda x: jnp.sin(x) @ x)
    x = jnp.ones((64, 64))
    product(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            product(x).block_until_ready()
    events = gpu_speed.device_events(next(tmp_path.rglob("*.xplane.pb")))
    assert sum("sin" in event.name for event in events) >= 3
    made_up = [
        gpu_speed.Event("", 0, 2),
        gpu_speed.Event("", 1, 3),
        gpu_speed.Event("", 5, 1),
        gpu_speed.Event("", 6, 1),
    ]
    assert gpu_speed.gaps(made_up) == [1]


def test_agreement_of_a_device_with_itself():
    found = [np.ones(3), np.arange(1.0, 4)]
    assert gpu_speed.disagreement(found, found, 0.02)["agrees"]
    assert not gpu_speed.disagreement([found[0], 1.1 * found[1]], found, 0.02)["agrees"]


def test_long_words_of_a_source_are_cut(tmp_path):
    """Check that long words are cut, because the time to encode a word grows with the square of its length."""
    path = tmp_path / "blob.py"
    path.write_bytes(b"x = '" + b"abcd" * 50_000 + b"'\n")
    vocabulary = tmp_path / "vocabulary.npz"
    np.savez(vocabulary, merges=np.array([[97, 98], [99, 100]], np.uint16))
    tokens = gpu_text._encode(vocabulary, [path])
    assert len(tokens) < 110_000 and set(tokens[10:100]) == {256, 257}
    assert max(map(len, gpu_text.WORD.findall(path.read_bytes()))) <= 33


def test_variant():
    chosen = gpu_variants.variant("kfac:0.1,tables=0.5,tokens=0.5,momentum=0.95")
    assert (chosen.method, chosen.rate, chosen.settings["momentum"]) == ("kfac", 0.1, 0.95)
    assert [chosen.multiplier(kind) for kind in ("tokens", "positions", "up")] == [0.25, 0.5, 1]
    assert chosen.public and not gpu_variants.variant("kfac:0.1,split=1").public
    assert gpu_variants.variant("muon:0.02").settings == {"adam": 1.0}
    texts = gpu_variants.SEARCHED
    assert len(set(map(gpu_variants.variant, texts))) == len(texts) == 15


def test_best_takes_the_lowest_losses_that_programme_b_can_run():
    losses = {
        "kfac:0.1": 3.5,
        "kfac:0.1,tables=0.3": 3.3,
        "kfac:0.1,interval=4": 3.1,
        "muon:0.015": 3.4,
        "muon:0.015,adam=0.3": float("nan"),
    }
    rows = {text: {"validation": loss} for text, loss in losses.items()}
    assert {x.text for x in gpu_variants.best(rows)} == {"kfac:0.1,tables=0.3", "muon:0.015"}
    assert {x.method for x in gpu_variants.best({})} == {"kfac", "muon"}
