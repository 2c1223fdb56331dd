"""Test whole runs of `examples/imagenet`, as users start them, stop them, kill them and restart them.

The runs use one device or more. They share compiled programs (tests/runs.py), so they are parts of a few long runs.
"""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time

import jax
import numpy as np
import pytest
from PIL import Image

from runs import IMAGENET, end, finish, here, records, refused, start, state, train

pytestmark = pytest.mark.examples

SGD = ["--optimizer", "sgd", "--width", 8, "--schedule", "constant", "--steps", 2000, "--warmup-epochs", 1]
# An epoch has ten steps. After the tenth step, every other step has statistics. The weights are averaged.
RECIPE = ["--config", "bs128k", "--data", "digits", "--global-batch", "auto", "--width", 8, "--steps", 24,
          "--statistics-period", 2, "--ema", 0.9, "--log-every", 1]  # fmt: skip
LAUNCH = "launch/processes.sh"


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Run the recipe from beginning to end."""
    folder = tmp_path_factory.mktemp("recipe") / "whole"
    return folder, train(*RECIPE, "--output", folder).stdout


def test_what_a_run_leaves_and_says(whole):
    folder, out = whole
    lines = out.splitlines()
    assert "compiled step, statistics" in out and any("images/s" in x and "s/step" in x and "left" in x for x in lines)
    assert lines[-1].startswith("done: 24 steps") and "validation accuracy" in lines[-1]
    found = [r for r in records(folder) if "loss" in r]
    assert len(found) == 24 and all(np.isfinite(r["loss"]) for r in found)
    assert [r["kfac/statistics_age"] for r in found] == [0 if k < 10 or k % 2 == 0 else 1 for k in range(24)]
    rates = [r["learning_rate"] for r in found]
    assert rates[0] == rates[9] > rates[11] > rates[-1]
    last = next(r for r in reversed(records(folder)) if "val_accuracy" in r)
    assert last["val_accuracy"] <= last["val_top5_accuracy"] <= 1
    image = Image.open(folder / "curves.png")
    assert image.width > 500 and len(np.unique(np.asarray(image.convert("L")))) > 10
    saved = json.loads((folder / "config.json").read_text())
    assert saved["config"] == "bs128k" and saved["learning_rate"] == 0.07 and saved["dtype"] == "float32"
    # The saved state shows the recipe's effects.
    kept = state(folder, 24)
    mixed = kept["mixed"]["targets"]
    assert mixed.shape == (150, 10) and ((mixed > 0).sum(1) > 1).mean() > 0.5
    assert (kept["mixed"]["images"] == 0).mean() > 0.01
    for (path, leaf), average in zip(
        jax.tree_util.tree_flatten_with_path(kept["params"])[0], jax.tree.leaves(kept["ema"][0]), strict=True
    ):
        assert 0 < np.linalg.norm(leaf - average) or not leaf.any()
        if path[-1].key == "kernel":
            assert np.linalg.norm(leaf) <= np.sqrt(2 * leaf.shape[-1]) * (1 + 1e-5)


def test_the_same_command_goes_on_bit_for_bit_after_a_kill(whole, tmp_path):
    folder, _ = whole
    options = [*RECIPE, "--checkpoint-every", 3, "--output", tmp_path / "parts"]
    run = start(*options)
    for line in run.stdout:
        if re.match(r"step +14/", line):
            run.send_signal(signal.SIGKILL)
            break
    end(run)
    out = train(*options).stdout
    assert re.search(r"resuming .* at step \d+ of 24", out) and "done: 24 steps" in out
    assert records(tmp_path / "parts") == records(folder)
    same(state(tmp_path / "parts", 24), state(folder, 24))
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "parts/metrics.jsonl").read_text().splitlines()]
    assert seconds == sorted(seconds)


def test_a_signal_ends_a_run_with_a_checkpoint_and_one_that_is_done_does_nothing_more(tmp_path):
    options = [*SGD, "--log-every", 1, "--output", tmp_path / "a"]
    run = start(*options)
    for line in run.stdout:
        if re.match(r"step +5/", line):
            run.send_signal(signal.SIGTERM)
            break
    step = int(re.search(r"stopped by SIGTERM at step (\d+) of 2000", finish(run, 143).stdout).group(1))
    assert records(tmp_path / "a")[-1]["step"] == step >= 5
    options += ["--steps", step + 20]
    out = here(*options)
    assert f"at step {step} of {step + 20}" in out and f"done: {step + 20} steps" in out
    assert [r["step"] for r in records(tmp_path / "a") if "loss" in r] == list(range(1, step + 21))
    # The third start has no steps left, as in a chain of jobs.
    before = contents(tmp_path / "a" / "checkpoints")
    assert f"done: {step + 20} steps" in here(*options)
    assert contents(tmp_path / "a" / "checkpoints") == before


@pytest.mark.slow
def test_the_recipe_goes_on_bit_for_bit_after_a_signal_and_once_more(whole, tmp_path):
    options = [*RECIPE, "--checkpoint-every", 3, "--output", tmp_path / "parts"]
    run = start(*options)
    for line in run.stdout:
        if re.match(r"step +5/", line):
            run.send_signal(signal.SIGTERM)
            break
    step = int(re.search(r"stopped by SIGTERM at step (\d+) of 24", finish(run, 143).stdout).group(1))
    assert records(tmp_path / "parts")[-1]["step"] == step >= 5
    for _ in range(2):
        assert "done: 24 steps" in train(*options).stdout
        assert records(tmp_path / "parts") == records(whole[0])
        same(state(tmp_path / "parts", 24), state(whole[0], 24))


@pytest.mark.slow
def test_going_on_growing_and_what_is_refused(tmp_path):
    options = [*SGD, "--output", tmp_path / "a"]
    train(*options, "--stop-after", 2)
    before = contents(tmp_path)
    sentence = refused(*options, "--optimizer", "lars")
    assert all(word in sentence for word in ("--optimizer", "lars", "sgd", "another --output")), sentence
    sentence = refused(*options, "--batch-size", 100)
    assert all(word in sentence for word in ("--global-batch", "100", "144")), sentence
    assert "is at step 2" in refused(*options, "--stop-after", 1)
    (tmp_path / "file").write_text("")
    assert "not a folder" in refused("--output", tmp_path / "file")
    (tmp_path / "file").unlink()
    assert contents(tmp_path) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    assert "by no run of this script" in refused(*SGD, "--output", tmp_path / "other")
    # Extend the run, from another folder.
    grown = train(*SGD, "--output", "a", "--steps", 2001, "--stop-after", 3, cwd=tmp_path).stdout
    assert "at step 2 of 2001" in grown and "stopped by --stop-after 3" in grown
    # While a process trains there, another process is refused.
    run = start(*options, "--steps", 2001)
    for line in run.stdout:
        if line.startswith("step"):
            assert "another process trains there" in refused(*options, "--steps", 2001)
            run.send_signal(signal.SIGINT)
            break
    assert "stopped by SIGINT" in finish(run, 130).stdout


EVERY_TWO = [*SGD, "--checkpoint-every", 2, "--stop-after"]


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Return a run of six steps, and a run of its first four steps."""
    folders = [tmp_path_factory.mktemp(f"{steps}") / "run" for steps in (6, 4)]
    for steps, folder in zip((6, 4), folders, strict=True):
        here(*EVERY_TWO, steps, "--output", folder)
    return folders


# tests/examples/test_example_checkpoints.py covers damage in other files.
@pytest.mark.parametrize("damage", ["64 bytes", pytest.param("manifest", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_one_line_and_the_run_goes_on_from_the_one_before(six, tmp_path, damage):
    whole, four = six
    shutil.copytree(four, tmp_path / "parts")
    last = tmp_path / "parts" / "checkpoints" / "4" / "state"
    if damage == "manifest":
        path = last / "manifest.ocdbt"
        changed = path.read_bytes()[: path.stat().st_size // 2]
    else:
        path = max((p for p in last.rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size)
        middle, data = path.stat().st_size // 2, path.read_bytes()
        changed = data[:middle] + bytes(x ^ 255 for x in data[middle : middle + 64]) + data[middle + 64 :]
    path.write_bytes(changed)
    done = train(*EVERY_TWO, 6, "--output", tmp_path / "parts")
    assert not done.stderr and done.stdout.count("is damaged (state/") == 1
    assert f"resuming {tmp_path / 'parts'} at step 2" in done.stdout
    assert records(tmp_path / "parts") == records(whole)
    same(state(tmp_path / "parts", 6), state(whole, 6))


def test_metrics_after_the_last_checkpoint_are_made_again(six, tmp_path):
    whole, four = six
    shutil.copytree(four, tmp_path / "b")
    # A killed run leaves steps after its checkpoint, and a line cut short.
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    assert "1 damaged line(s)" in here(*EVERY_TWO, 6, "--output", tmp_path / "b")
    assert records(whole) == records(tmp_path / "b")
    assert (tmp_path / "b" / "metrics.damaged").read_text() == '{"step": 6, "lo\n'


@pytest.mark.slow
def test_checkpoints_by_time(tmp_path):
    """Check that there is a single checkpoint, at the end, despite several epochs with increasing accuracy."""
    train(*SGD, "--stop-after", 35, "--output", tmp_path / "a")
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == ["35"]
    train(*SGD, "--stop-after", 5, "--checkpoint-minutes", 1e-6, "--log-every", 1, "--keep-checkpoints", 9, "--output",
          tmp_path / "b")  # fmt: skip
    assert {int(path.name) for path in (tmp_path / "b" / "checkpoints").iterdir()} >= {2, 3, 4, 5}


def test_a_target_and_an_evaluation(tmp_path):
    options = [*SGD, "--target-accuracy", 0.3, "--output", tmp_path / "a"]
    out = here(*options)
    step = int(re.search(r"stopped by --target-accuracy, reached at step (\d+) of 2000", out).group(1))
    last = [r for r in records(tmp_path / "a") if "val_accuracy" in r][-1]
    assert last["step"] == step and last["val_accuracy"] >= 0.3
    assert f"at step {step} of 2000" in here(*options).splitlines()[-1]  # the target stays reached
    before = contents(tmp_path)
    found = re.search(r"step (\d+): validation loss ([\d.]+), accuracy ([\d.]+)%", here("--eval", tmp_path / "a"))
    assert int(found[1]) == step and float(found[2]) == pytest.approx(last["val_loss"], abs=1e-4)
    assert float(found[3]) == pytest.approx(100 * last["val_accuracy"], abs=0.01)
    assert contents(tmp_path) == before


def test_what_ended_before_its_first_checkpoint_may_begin_again_with_other_options(tmp_path):
    sentence = refused(*SGD, "--learning-rate", 1e38, "--output", tmp_path / "a")
    assert "no checkpoint was written yet" in sentence and (tmp_path / "a" / "config.json").exists()
    assert "step 1/" in here(*SGD, "--stop-after", 1, "--output", tmp_path / "a").replace("   ", "")
    assert len(records(tmp_path / "a")) == 1


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("kfac", marks=pytest.mark.slow)])
def test_nan_stops_with_a_name_and_is_never_saved(tmp_path, optimizer):
    options = ["--optimizer", optimizer, "--learning-rate", 1e38, "--steps", 60, "--checkpoint-every", 1, "--width", 8]
    sentence = refused(*options, "--output", tmp_path / "a")
    assert re.search(r"the (loss|gradient|parameter|batch-norm) .*became NaN or infinite at step", sentence)
    assert "--learning-rate" in sentence
    # All saved parameters are finite.
    for path in (tmp_path / "a" / "checkpoints").glob("*"):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state(tmp_path / "a", int(path.name))["params"]))


# -- images in files ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Write forty images for training and 13 for validation, two of them broken."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 13)):
        with tarfile.open(folder / f"{split}-0.tar", "w") as tar:
            for i in range(count):
                pixels = rng.integers(0, 60, (50, 40, 3), np.uint8)
                pixels[..., i % 3] += 150
                file = io.BytesIO()
                Image.fromarray(pixels).convert(("RGB", "L", "CMYK")[i % 4 % 3]).save(file, "JPEG")
                content = b"broken" if i == 5 else file.getvalue()
                for ending, data in (("jpg", content), ("cls", str(i % 3).encode())):
                    member = tarfile.TarInfo(f"{i:04d}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return folder


IMAGES = ["--arch", "digits", "--image-size", 16, "--batch-size", 8, "--optimizer", "sgd", "--width", 8,
          "--learning-rate", 0.1, "--steps", 40, "--log-every", 1  ]  # fmt: skip


@pytest.mark.slow
def test_a_signal_and_other_workers_change_nothing(shards, tmp_path):
    options = ["--data-dir", shards, *IMAGES, "--output"]
    out = train(*options, tmp_path / "whole", "--workers", 2)
    assert out.stderr.count("0005.jpg: damaged, or not a readable image") == 2
    assert "2 broken images" in out.stdout.splitlines()[-1]
    run = start(*options, tmp_path / "parts", "--workers", 1)
    for line in run.stdout:
        if line.startswith("step"):
            os.killpg(run.pid, signal.SIGTERM)
            break
    done = finish(run, 143)
    step = int(re.search(r"stopped by SIGTERM at step (\d+) of 40", done.stdout).group(1))
    assert step < 40 and "leaked" not in done.stderr
    train(*options, tmp_path / "parts", "--workers", 5)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    last = records(tmp_path / "whole")[-1]
    # The broken image does not count, so there are 12 images instead of 13.
    assert last["broken_images"] == 2
    assert last["val_accuracy"] * 12 == pytest.approx(round(last["val_accuracy"] * 12))
    # Other images than before are refused.
    for path in shards.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with tarfile.open(tmp_path / "val-0.tar", "a") as tar:
        for ending, data in (("jpg", b"broken"), ("cls", b"1")):
            member = tarfile.TarInfo(f"9999.{ending}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert "the data differ from the run" in refused("--data-dir", tmp_path, *IMAGES, "--output", tmp_path / "parts")


# -- several devices and processes -------------------------------------------------------------------------------------


def assert_same(a, b, tolerance):
    """Compare parameters and batch-norm averages, each leaf relative to its norm."""
    for name in ("params", "batch_stats"):
        found, expected = (jax.tree_util.tree_flatten_with_path(x[name])[0] for x in (a, b))
        for (path, x), (_, y) in zip(found, expected, strict=True):
            error = np.linalg.norm(x.astype(np.float64) - y) / np.linalg.norm(y)
            assert error < tolerance, f"{name}{jax.tree_util.keystr(path)}: {error}"


@pytest.mark.slow
def test_default_job_in_two_processes_on_four_devices_and_on_one(tmp_path):
    """Compare in float64, where the worst leaf differs by 6e-15 after 40 steps.

    In float32 it differs by 5e-6, unless an activation is so close to zero that rounding decides whether its ReLU
    passes the gradient. With these weights this happens to an activation of 1e-8 in the fifth step, a single activation
    among 73,728. The difference is then 1e-4.
    """
    job = ["--dtype", "float64", "--width", 8, "--steps", 40, "--output"]
    one = train(*job, tmp_path / "one").stdout
    assert "1 device(s) in 1 process(es)" in one
    four = train(*job, tmp_path / "four", devices=4).stdout
    assert "4 device(s) in 1 process(es)" in four
    two = train(*job, tmp_path / "two", name=LAUNCH, devices=2).stdout
    assert "4 device(s) in 2 process(es)" in two
    # Only a single process writes and prints.
    assert two.count("done: 40 steps") == 1
    lines = {name: (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "four", "two")}
    assert {len(text) for text in lines.values()} == {44}  # a line for each step and for each validation
    expected = state(tmp_path / "one", 40)
    assert_same(state(tmp_path / "four", 40), expected, 1e-12)
    assert_same(state(tmp_path / "two", 40), expected, 1e-12)


@pytest.mark.slow
def test_two_processes_stop_together_and_one_goes_on_with_accumulation(tmp_path):
    options = [*SGD, "--log-every", 1, "--output", tmp_path / "a"]
    run = start(*options, "--local-batch", 36, name=LAUNCH, devices=2)
    for line in run.stdout:
        if line.startswith("step"):
            run.send_signal(signal.SIGTERM)
            break
    step = int(re.search(r"stopped by SIGTERM at step (\d+) of 2000", finish(run, 143).stdout).group(1))
    again = train(*options, "--local-batch", 36, "--stop-after", step + 1, devices=2).stdout
    assert "2 micro-batch(es) of 36 images" in again and f"at step {step} of 2000" in again


# How long a process may continue without the other, as in docs/distributed.md. jax.distributed notices the loss after
# 100 s.
WITHOUT_ANOTHER = 180


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, 1])
def test_without_the_other_a_process_ends_with_an_error_and_the_run_goes_on(tmp_path, number, victim):
    options = [*SGD, "--optimizer", "kfac", "--checkpoint-every", 2, "--log-every", 1, "--output", tmp_path / "a"]
    with socket.socket() as found:
        found.bind(("localhost", 0))
        place = f"localhost:{found.getsockname()[1]}"
    runs = [start(*options, "--processes", place, 2, k) for k in range(2)]
    for line in runs[0].stdout:
        if line.startswith("step") and int(re.match(r"step +(\d+)", line)[1]) >= 5:
            break
    began = time.monotonic()
    try:
        runs[victim].send_signal(number)
        _, trouble = runs[1 - victim].communicate(timeout=WITHOUT_ANOTHER)
        assert runs[1 - victim].returncode != 0 and trouble
        assert time.monotonic() - began < WITHOUT_ANOTHER
    finally:
        for run in runs:
            run.kill()
            run.communicate()
    step = max(int(path.name) for path in (tmp_path / "a" / "checkpoints").iterdir() if path.name.isdigit())
    again = train(*options, "--stop-after", step + 1, devices=2).stdout
    assert re.search(rf"resuming .* at step {step} of", again)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen", [["--preconditioner", "eigh"], ["--preconditioner", "cholesky", "--statistics-period", 2]], ids=str
)
def test_other_curvatures_go_on_bit_for_bit(tmp_path, chosen):
    """Use two devices and micro-batches."""
    options = [*chosen, "--width", 8, "--steps", 8, "--batch-size", 48, "--local-batch", 12]
    train(*options, "--output", tmp_path / "whole", devices=2)
    train(*options, "--output", tmp_path / "parts", "--stop-after", 5, devices=2)
    train(*options, "--output", tmp_path / "parts", devices=2)
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    same(state(tmp_path / "whole", 8), state(tmp_path / "parts", 8))


@pytest.mark.slow
def test_the_recipe_on_other_devices(tmp_path):
    """Stop on four devices, and resume on two with other micro-batches.

    Up to rounding, the run matches a run on two devices.
    """
    options = ["--config", "bs128k", "--data", "digits", "--global-batch", 144, "--width", 8, "--steps", 8]
    train(*options, "--local-batch", 18, "--stop-after", 4, "--output", tmp_path / "a", devices=4)
    train(*options, "--local-batch", 36, "--output", tmp_path / "a", devices=2)
    train(*options, "--local-batch", 36, "--output", tmp_path / "b", devices=2)
    one, two = state(tmp_path / "a", 8), state(tmp_path / "b", 8)
    for name in ("images", "targets"):
        # Random numbers and the batch's order do not depend on devices.
        np.testing.assert_allclose(one["mixed"][name], two["mixed"][name], atol=1e-6)
    for a, b in zip(jax.tree.leaves(one["params"]), jax.tree.leaves(two["params"]), strict=True):
        assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["kfac", "muon", "sgd", "lars", "adamw"])
def test_the_main_job(tmp_path, optimizer):
    train("--optimizer", optimizer, "--output", tmp_path / "a")
    last = [r for r in records(tmp_path / "a") if "val_accuracy" in r][-1]
    assert last["val_accuracy"] >= 0.97


# -- the terminal ------------------------------------------------------------------------------------------------------


def test_help_and_a_reader_that_has_seen_enough(tmp_path):
    done = train("--help")
    for option in ("--optimizer", "--data-dir", "--local-batch", "--damping", "--batch-size"):
        assert option in done.stdout
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = f"{sys.executable} {IMAGENET / 'train.py'} --print-config | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=env, cwd=tmp_path, check=True)
    assert done.stdout == "{" and done.stderr == ""
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--batch-size", "2000"], ["2000", "1500"]),
        (["--devices", "1", "--local-batch", "7"], ["144", "7"]),
        (["--devices", "3", "--global-batch", "100"], ["100", "3 devices"]),
        (["--devices", "99"], ["99", "JAX_NUM_CPU_DEVICES"]),
        (["--data-dir", "nowhere"], ["nowhere", "does not exist"]),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, monkeypatch, args, words):
    monkeypatch.syspath_prepend(str(IMAGENET))
    monkeypatch.chdir(tmp_path)
    import train as script

    with pytest.raises(script.UserError) as caught:
        script.main(args)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_one_command_compares_two_optimizers(tmp_path):
    """Rehearse the runs on CIFAR-10."""
    env = {"SEEDS": "0", "FOLDER": str(tmp_path / "runs")}
    options = ["--data", "digits", "--width", 8, "--steps", 4, "--log-every", 1]
    began = time.monotonic()
    out = train(*options, name="launch/compare.sh", env=env).stdout
    assert "kfac-0" in out and "sgd-0" in out and (tmp_path / "runs" / "curves.png").exists()
    assert time.monotonic() - began < 600
    rates = [
        [r["learning_rate"] for r in records(tmp_path / "runs" / name) if "loss" in r] for name in ("kfac-0", "sgd-0")
    ]
    assert len(rates[0]) == len(rates[1]) == 4


@pytest.mark.slow  # on a busy machine, tensorstore's threads may print another line
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True, check=False
    ).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        options = [*SGD, "--stop-after", 60, "--checkpoint-every", 1, "--keep-checkpoints", 99, "--output", disk / "a"]
        assert "No space left on device" in refused(*options)
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        out = train(*options[:-2], "--stop-after", 50, "--output", disk / "a").stdout
        assert re.search(r"resuming .* at step \d+ of 2000", out) and "stopped by --stop-after 50" in out
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
