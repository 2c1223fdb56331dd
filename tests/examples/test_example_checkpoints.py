"""Test the checkpoints of `examples/imagenet`: a damaged checkpoint is set aside, and its predecessor is restored.

A full disk gives an error of a single sentence.
"""

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runs import IMAGENET, ROOT, here, state

# tests/optimizer/test_checkpoints.py explains the warnings, which come from orbax after an error.
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
    """Save checkpoints of steps 10 and 20."""
    saved = checkpoints.Checkpoints(tmp_path / "run", keep=3)
    for step in (10, 20):
        saved.save(step, make(step), {"broken": []}, 0.5)
    return tmp_path / "run"


def restore(checkpoints, folder, like):
    return checkpoints.Checkpoints(folder, keep=3).restore(like)


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


FILES = [
    "state/d/*",
    "state/manifest.ocdbt",
    "state/_METADATA",
    "about.json",
    "SHA256SUMS",
    "*/*",
]


def cut(folder, files, keep):
    found = [path for path in folder.glob(files) if path.is_file()]
    assert found
    for path in found:
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


@pytest.mark.parametrize("keep", [0, 0.5])
@pytest.mark.parametrize("files", FILES)
def test_one_that_is_cut_short_is_set_aside_and_the_one_before_is_good(checkpoints, folder, files, keep, capsys):
    cut(folder / "20", files, keep)
    damaged = sorted(path.read_bytes() for path in (folder / "20").rglob("*") if path.is_file())
    state, extra = restore(checkpoints, folder, make(0))
    np.testing.assert_array_equal(state.params["kernel"], make(10).params["kernel"])
    assert extra == {"broken": [], "val_accuracy": 0.5} and int(state.opt_state[0]) == 10
    # The damaged files are kept for inspection, and a single line reports them.
    assert sorted(path.read_bytes() for path in (folder / "damaged-20-0").rglob("*") if path.is_file()) == damaged
    assert f"{folder}/20 is damaged" in capsys.readouterr().out and not (folder / "20").exists()
    # The run continues, and its next checkpoint of that step is good.
    saved = checkpoints.Checkpoints(folder, keep=3)
    saved.save(20, make(20), {"broken": []}, 0.5)
    assert int(restore(checkpoints, folder, make(0))[0].opt_state[0]) == 20


def test_where_none_can_be_read_nothing_is_begun_anew(checkpoints, folder):
    shutil.rmtree(folder / "10")
    cut(folder / "20", "state/d/*", 0)
    before = contents(folder)
    with pytest.raises(
        checkpoints.UserError, match=r"20 is damaged \(state/d/.* is not as it was written\), and there is no other"
    ):
        restore(checkpoints, folder, make(0))
    assert contents(folder) == before


def arrays(tree):
    """Return a checkpoint's arrays by path, because a restored checkpoint may have other containers."""
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}  # fmt: skip


@pytest.mark.parametrize(("optimizer", "flips"), [pytest.param("sgd", 40, marks=pytest.mark.slow), ("kfac", 8)])
def test_a_flipped_bit_is_never_restored(checkpoints, tmp_path, optimizer, flips, capsys):
    """Flip random bits in the data files of the last checkpoint of a script's run."""
    here("--optimizer", optimizer, "--width", 4, "--steps", 10, "--checkpoint-every", 5, "--output", tmp_path / "run")
    good = tmp_path / "run" / "checkpoints"
    before, last = (arrays(state(tmp_path / "run", step)) for step in (5, 10))
    assert any((before[name] != last[name]).any() for name in before)
    like = jax.tree.map(jnp.asarray, state(tmp_path / "run", 10))
    rng, wrong = np.random.default_rng(0), 0
    for k in range(flips):
        folder = tmp_path / f"flipped-{k}"
        shutil.copytree(good, folder)
        files = sorted(
            path for path in (folder / "10" / "state").rglob("*") if path.is_file() and path.parent.name == "d"
        )
        sizes = np.array([path.stat().st_size for path in files])
        file = files[rng.choice(len(files), p=sizes / sizes.sum())]
        data = bytearray(file.read_bytes())
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        file.write_bytes(data)
        found = arrays(restore(checkpoints, folder, like)[0])
        wrong += any((found[name] != before[name]).any() for name in before)
        shutil.rmtree(folder)
    assert wrong == 0
    assert capsys.readouterr().out.count("10 is damaged (state/") == flips


@pytest.mark.parametrize("files", ["SHA256SUMS", "*.json", "*/*", "*/*/*"])
def test_a_flipped_bit_anywhere_is_noticed(checkpoints, folder, files):
    for path in sorted(path for path in (folder / "20").glob(files) if path.is_file()):
        data = path.read_bytes()
        for at in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert checkpoints.damage(folder / "20")
        path.write_bytes(data)
    assert not checkpoints.damage(folder / "20")
    assert (
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder / "20", check=False).returncode
        == 0
    )


def test_processes_share_the_files_that_they_check(checkpoints, folder):
    cut(folder / "20", "about.json", 0.5)
    assert [bool(checkpoints.damage(folder / "20", k, 4)) for k in range(4)].count(True) == 1


def test_only_what_was_checked_is_called_good(checkpoints, folder):
    saved = checkpoints.Checkpoints(folder, keep=3)
    assert saved.describe() == f"the checkpoint {folder}/20 is good"
    saved.restore(make(0))
    # The trouble may come from the checkpoint that was restored.
    assert "was resumed from" in saved.describe() and saved.describe().endswith("from 10, whose checksums are right")
    cut(folder / "10", "state/d/*", 0.5)
    assert saved.describe().endswith("from the beginning, as there is no other")
    saved.save(30, make(30), {"broken": []}, 0.5)
    assert saved.describe() == f"the checkpoint {folder}/30 is good"
    cut(folder / "30", "state/d/*", 0.5)
    assert "30" not in saved.describe()


def test_the_best_that_is_damaged_is_left_out(checkpoints, tmp_path):
    kept = checkpoints.Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
    for step, accuracy in ((1, 0.2), (2, 0.9), (3, 0.5)):
        kept.save(step, make(step), {"broken": []}, accuracy)
    cut(tmp_path / "run" / "checkpoints" / "2", "state/d/*", 0.5)
    params, _, step = checkpoints.weights(tmp_path / "run")
    assert step == 3 and params["bias"][0] == 3
    cut(tmp_path / "run" / "checkpoints" / "3", "state/d/*", 0.5)
    with pytest.raises(checkpoints.UserError, match="holds no undamaged checkpoint"):
        checkpoints.weights(tmp_path / "run")


def test_what_a_kill_left_half_written_or_half_deleted_is_removed(checkpoints, folder):
    (folder / "10").rename(folder / "10.partial")
    (folder / "10.partial" / "SHA256SUMS").unlink()
    (folder / "30.partial").mkdir()
    assert int(restore(checkpoints, folder, make(0))[0].opt_state[0]) == 20
    assert sorted(path.name for path in folder.iterdir()) == ["20"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_an_io_error_is_no_damaged_checkpoint(checkpoints, folder, monkeypatch, code):
    before = contents(folder)
    with monkeypatch.context() as patch:

        def fails(self, *args, **kwargs):
            raise ValueError("in a library") from OSError(code, os.strerror(code))

        patch.setattr(checkpoints.ocp.StandardCheckpointer, "restore", fails)
        with pytest.raises(
            checkpoints.UserError, match=rf"20 cannot be read now: {os.strerror(code)}.*nothing was changed"
        ):
            restore(checkpoints, folder, make(0))
    assert contents(folder) == before
    assert int(restore(checkpoints, folder, make(0))[0].opt_state[0]) == 20


def test_a_full_disk_while_writing_is_one_sentence(checkpoints, folder, monkeypatch):
    saved = checkpoints.Checkpoints(folder, keep=3)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.ocp.StandardCheckpointer, "save", full)
        with pytest.raises(checkpoints.UserError, match=r"no checkpoint can be written to .*: No space left on device"):
            saved.save(30, make(30), {"broken": []}, 0.5)
    assert int(restore(checkpoints, folder, make(0))[0].opt_state[0]) == 20


def test_the_best_is_kept_besides_the_last_and_is_what_weights_gives(checkpoints, tmp_path):
    class Whole(NamedTuple):
        params: Any
        batch_stats: Any
        ema: Any
        opt_state: Any

    def counted(k, ema=()):
        return Whole({"w": jnp.full(3, float(k))}, {"m": jnp.zeros(2)}, ema, jnp.int32(k))

    kept = checkpoints.Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
    assert kept.latest() is None
    for step, accuracy in enumerate([0.2, 0.9, None, 0.5, None, 0.6], 1):
        kept.save(step, counted(step), {"broken": []}, accuracy)
    assert sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) == [2, 5, 6]
    params, stats, step = checkpoints.weights(tmp_path / "run")
    assert step == 2 and params["w"].tolist() == [2, 2, 2] and stats["m"].tolist() == [0, 0]
    # Averages have precedence.
    kept = checkpoints.Checkpoints(tmp_path / "averaged" / "checkpoints", keep=2)
    kept.save(1, counted(1, ({"w": jnp.full(3, 7.0)}, {"m": jnp.ones(2)})), {"broken": []}, 0.1)
    params, stats, _ = checkpoints.weights(tmp_path / "averaged")
    assert params["w"].tolist() == [7, 7, 7] and stats["m"].tolist() == [1, 1]
    with pytest.raises(checkpoints.UserError, match="holds no undamaged checkpoint"):
        checkpoints.weights(tmp_path)


@pytest.mark.parametrize(
    "like",
    [
        make(0, width=41),
        make(0)._replace(params={"kernel": make(0).params["kernel"]}),
        make(0)._replace(opt_state=(jnp.int32(0), jnp.zeros(3))),
    ],
    ids=["model", "parameter", "version"],
)
def test_one_of_another_model_or_version_is_not_damaged(checkpoints, folder, like):
    before = contents(folder)
    with pytest.raises(checkpoints.UserError, match=rf"{folder}/20 is not from this run: .*version of kfac") as caught:
        restore(checkpoints, folder, like)
    assert "\n" not in str(caught.value)
    assert contents(folder) == before


KILLED = """
import os, signal, sys
sys.path[:0] = [{example!r}, {root!r}]
import jax.numpy as jnp
import checkpoints
saved = checkpoints.Checkpoints(__import__("pathlib").Path({folder!r}), keep=3)
saved.save(10, {{"w": jnp.ones(1_000_000)}}, {{"broken": []}}, 0.5)
# Everything of the next one is written but its name and, with `early`, its checksums.
if {early}:
    checkpoints._sum = lambda path: os.kill(os.getpid(), signal.SIGKILL)
else:
    checkpoints.Path.rename = lambda path, to: os.kill(os.getpid(), signal.SIGKILL)
saved.save(20, {{"w": jnp.arange(4_000_000.0)}}, {{"broken": []}}, 0.5)
"""


@pytest.mark.parametrize("early", [True, False])
def test_a_process_killed_while_it_writes_leaves_the_one_before(checkpoints, tmp_path, early):
    code = KILLED.format(example=str(IMAGENET), root=str(ROOT), folder=str(tmp_path / "run"), early=early)
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "run" / "20.partial" / "state").exists() and not (tmp_path / "run" / "20").exists()
    state, _ = restore(checkpoints, tmp_path / "run", {"w": jnp.zeros(1_000_000)})
    np.testing.assert_array_equal(state["w"], np.ones(1_000_000))
    # The run continues, and its next checkpoint of that step is good.
    saved = checkpoints.Checkpoints(tmp_path / "run", keep=3)
    saved.save(20, {"w": jnp.full(7, 3.0)}, {"broken": []}, 0.5)
    state, _ = restore(checkpoints, tmp_path / "run", {"w": jnp.zeros(7)})
    assert float(state["w"][0]) == 3
