"""`examples/imagenet`: checkpoints that cannot be used are refused in a sentence, and those before them are good."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from runs import IMAGENET, ROOT

# What orbax leaves behind after an error: see tests/test_checkpoints.py.
pytestmark = [pytest.mark.examples, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


@pytest.fixture(autouse=True)
def what_orbax_leaves_behind():
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()


@pytest.fixture
def checkpoints(monkeypatch):
    monkeypatch.syspath_prepend(str(IMAGENET))
    import checkpoints

    return checkpoints


class State(NamedTuple):
    params: Any
    opt_state: Any


def make(step, width=40):
    return State(
        {"kernel": jnp.full((30, width), float(step)), "bias": jnp.full(width, float(step))}, (jnp.int32(step),)
    )


@pytest.fixture
def folder(checkpoints, tmp_path):
    """Checkpoints of steps 10 and 20."""
    saved = checkpoints.Checkpoints(tmp_path / "run", keep=3)
    for step in (10, 20):
        saved.save(step, make(step), {"broken": []}, 0.5)
    saved.close()
    return tmp_path / "run"


def restore(checkpoints, folder, like):
    saved = checkpoints.Checkpoints(folder, keep=3)
    try:
        return saved.restore(like)
    finally:
        saved.close()


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("keep", [0, 0.5])
@pytest.mark.parametrize("files", ["state/d/*", "state/manifest.ocdbt", "state/_METADATA", "extra/*", "*/*"])
def test_one_that_is_cut_short_is_named_and_the_one_before_is_good(checkpoints, folder, files, keep):
    cut = [path for path in (folder / "20").glob(files) if path.is_file() and "metrics" not in str(path)]
    assert cut
    for path in cut:
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    before = contents(folder)
    with pytest.raises(checkpoints.UserError) as caught:
        restore(checkpoints, folder, make(0))
    sentence = str(caught.value)
    assert "\n" not in sentence and "cut short" in sentence
    assert f"{folder}/20 cannot be read" in sentence and "remove that folder" in sentence and "step 10" in sentence
    assert contents(folder) == before
    # What the sentence says to do.
    shutil.rmtree(folder / "20")
    state, extra = restore(checkpoints, folder, make(0))
    np.testing.assert_array_equal(state.params["kernel"], make(10).params["kernel"])
    assert extra == {"broken": []} and int(state.opt_state[0]) == 10


@pytest.mark.parametrize(
    ("like", "words"),
    [
        (make(0, width=41), ["params/bias has shape [40], that of this run [41]"]),
        (
            make(0)._replace(params={"kernel": make(0).params["kernel"]}),
            ["it has params/bias, which this run does not"],
        ),
        (make(0)._replace(opt_state=(jnp.int32(0), jnp.zeros(3))), ["it has no opt_state/1", "version of kfac"]),
    ],
    ids=["model", "parameter", "version"],
)
def test_one_of_another_model_or_version_says_in_what_it_differs(checkpoints, folder, like, words):
    before = contents(folder)
    with pytest.raises(checkpoints.UserError) as caught:
        restore(checkpoints, folder, like)
    assert all(word in str(caught.value) for word in [*words, f"{folder}/20 is not one of this run"]), caught.value
    assert contents(folder) == before


KILLED = """
import os, signal, sys, threading, time
sys.path[:0] = [{example!r}, {root!r}]
import jax.numpy as jnp
import checkpoints
saved = checkpoints.Checkpoints(__import__("pathlib").Path({folder!r}), keep=3)
saved.save(10, {{"w": jnp.ones(1_000_000)}}, {{"broken": []}}, 0.5)
saved._manager.wait_until_finished()
saved.save(20, {{"w": jnp.arange(4_000_000.0)}}, {{"broken": []}}, 0.5)
# In the middle of writing: the folder is there, under its temporary name.
print("writing", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_while_it_writes_leaves_the_one_before(checkpoints, tmp_path):
    code = KILLED.format(example=str(IMAGENET), root=str(ROOT), folder=str(tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL and "writing" in done.stdout, done.stderr
    assert not (tmp_path / "run" / "20").exists()
    state, _ = restore(checkpoints, tmp_path / "run", {"w": jnp.zeros(1_000_000)})
    np.testing.assert_array_equal(state["w"], np.ones(1_000_000))
    # The run goes on, and its next checkpoint of that step is a good one.
    saved = checkpoints.Checkpoints(tmp_path / "run", keep=3)
    saved.save(20, {"w": jnp.full(7, 3.0)}, {"broken": []}, 0.5)
    saved.close()
    state, _ = restore(checkpoints, tmp_path / "run", {"w": jnp.zeros(7)})
    assert float(state["w"][0]) == 3
    assert Path(tmp_path / "run" / "20").exists()
