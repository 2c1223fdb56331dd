"""Test `examples/autoencoder`, and the code shared by the examples that compare optimizers, on tiny sizes."""

import importlib
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.examples

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def comparison(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import comparison

    return comparison


@pytest.fixture
def autoencoder(monkeypatch, comparison):
    monkeypatch.syspath_prepend(str(EXAMPLES / "autoencoder"))
    import deep_autoencoder

    return deep_autoencoder


def test_the_network_and_its_losses_are_those_of_the_papers(autoencoder):
    """Compare with NumPy: tanh except at the code and the output, and Bernoulli cross-entropy summed over pixels."""
    params = autoencoder.init(jax.random.key(0), (64, 5, 3))
    assert [layer["kernel"].shape for layer in params] == [(64, 5), (5, 3), (3, 5), (5, 64)]
    images = np.random.default_rng(0).random((7, 64))
    x = images
    for k, layer in enumerate(params):
        x = x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"])
        x = np.tanh(x) if k in (0, 2) else x
    p = 1 / (1 + np.exp(-x))
    likelihood = images * np.log(p) + (1 - images) * np.log(1 - p)
    batch = jnp.asarray(images, jnp.float32)
    assert float(autoencoder.loss(params, batch)) == pytest.approx(-likelihood.sum(1).mean(), rel=1e-4)
    assert float(autoencoder.squared_error(params, batch)) == pytest.approx(((p - images) ** 2).sum(1).mean(), rel=1e-4)


def test_every_optimizer_learns_and_again_the_same(autoencoder):
    task = autoencoder.make((64, 4))
    assert {layer.kind for layer in task.layers} == {"dense"}
    for name, grid in autoencoder.GRIDS.items():
        settings = {key: values[len(values) // 2] for key, values in grid.items()} | {"learning_rate": 0.01}
        curve = task.run(name, settings, 4, 0, 2)
        assert [record["step"] for record in curve] == [2, 4]
        assert curve[-1]["training"] < curve[0]["training"] and curve[0]["seconds"] <= curve[1]["seconds"]
        again = task.run(name, settings, 4, 0, 2)
        assert [record["training"] for record in again] == [record["training"] for record in curve]
        other = task.run(name, settings, 4, 1, 2)
        assert other[-1]["training"] != curve[-1]["training"]


def test_the_schedule_rises_and_falls(comparison):
    steps, warmup = 20, 0.2
    rates = [float(comparison.shape(step, steps, warmup)) for step in range(steps)]
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1])
    expected = [0.5 * (1 + math.cos(math.pi * (step - 4) / 16)) for step in range(4, 20)]
    np.testing.assert_allclose(rates[4:], expected, atol=1e-6)


def test_points_of_a_grid_are_distinct_and_always_the_same(comparison):
    grid = {"a": (1, 2, 3), "b": (4, 5)}
    points = comparison.points(grid, 100)
    assert sorted((point["a"], point["b"]) for point in points) == [(a, b) for a in (1, 2, 3) for b in (4, 5)]
    assert comparison.points(grid, 2) == points[:2]


class Counted:
    """Replace a task by runs that take no time and end with their learning rate as the loss."""

    def __init__(self):
        self.runs = []

    def run(self, name, settings, steps, seed, every):
        self.runs.append((name, settings["learning_rate"]))
        loss = math.nan if settings["learning_rate"] == 0.3 else settings["learning_rate"]
        return [{"step": steps, "seconds": 1.0, "training": loss}]


def test_a_search_goes_on_where_it_stopped(comparison, tmp_path, capsys):
    grids = {"adam": {"learning_rate": (0.1, 0.2, 0.3)}, "kfac": {"learning_rate": (0.3, 0.4, 0.5)}}
    options = comparison.Options(steps=5, every=5, trials=2, refine=0, folder=tmp_path)
    task = Counted()
    comparison.search(task, grids, options, "training")
    assert [name for name, _ in task.runs] == ["adam", "kfac"] * 2
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"optimizer": "adam", "set')  # killed while it wrote
    again = Counted()
    options.trials = 3
    comparison.search(again, grids, options, "training")
    assert sorted(task.runs + again.runs) == [(name, rate) for name in grids for rate in grids[name]["learning_rate"]]
    trials = comparison.read(tmp_path / "trials.jsonl")
    assert len(trials) == 6
    assert comparison.best(trials, "adam", "training")["settings"] == {"learning_rate": 0.1}
    assert comparison.best(trials, "kfac", "training")["settings"] == {"learning_rate": 0.4}  # 0.3 diverged
    assert "kfac: {'learning_rate': 0.4} ends at" in capsys.readouterr().out


def test_a_search_goes_beyond_the_grid(comparison, tmp_path):
    """Check the trials at twice and half the best rate, repeated twice.

    K-FAC tries them only once, so it never has more trials than the others.
    """
    grids = {"adam": {"learning_rate": (0.1, 0.2)}, "kfac": {"learning_rate": (0.4, 0.5)}}
    task = Counted()
    comparison.search(task, grids, comparison.Options(steps=5, every=5, trials=2, folder=tmp_path), "training")
    rates = {name: sorted(rate for other, rate in task.runs if other == name) for name in grids}
    assert rates == {"adam": [0.025, 0.05, 0.1, 0.2], "kfac": [0.2, 0.4, 0.5, 0.8]}


def test_what_cannot_be_compared_is_refused(autoencoder, comparison, tmp_path):
    with pytest.raises(comparison.UserError, match=r"no trials of nesterov.*--tune"):
        autoencoder.main(["--folder", str(tmp_path)])
    with pytest.raises(comparison.UserError, match=r"--steps is 0"):
        autoencoder.main(["--steps", "0"])


def test_the_comparison_says_when_a_loss_is_reached(comparison):
    slow = [{"step": k, "seconds": k / 10, "training": 10 / k} for k in (1, 2, 4, 8)]
    fast = [{"step": k, "seconds": k / 5, "training": 3 / k} for k in (1, 2, 4, 8)]
    rows = list(comparison.table({"adam": slow, "kfac": fast}, "adam", "training"))
    assert rows[2].split(" | ")[1:] == ["1.2500", "8 (100%)", "0.8", "0.100 |"]
    assert rows[3].split(" | ")[1:] == ["0.3750", "4 (50%)", "0.8", "0.200 |"]
    assert comparison.mean([slow, fast])[1] == pytest.approx({"step": 2, "seconds": 0.3, "training": 3.25})
    assert comparison.first_at(slow, "training", 1) is None


def kept(comparison, grids, folder, measure):
    """Return the trials in an example's folder, and the curve of each optimizer's best trial."""
    trials = comparison.read(EXAMPLES / folder / "trials.jsonl")
    return trials, {name: comparison.best(trials, name, measure)["curve"] for name in grids}


@pytest.mark.parametrize(
    ("folder", "script", "measure"),
    [("autoencoder", "deep_autoencoder", "training"), ("language_model", "char_transformer", "validation")],
)
def test_the_page_shows_the_trials_that_are_kept(monkeypatch, comparison, tmp_path, capsys, folder, script, measure):
    """Check that the trials are from the declared grids, and that the table shows the best trials.

    K-FAC has no more trials than the others.
    """
    monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    example = importlib.import_module(script)
    grids = example.GRIDS
    trials, curves = kept(comparison, grids, folder, measure)
    counts = {name: sum(trial["optimizer"] == name for trial in trials) for name in grids}
    assert 0 < counts["kfac"] == min(counts.values()) and sum(counts.values()) == len(trials)
    for trial in trials:
        assert trial["steps"] == example.OPTIONS.steps
        grid = grids[trial["optimizer"]]
        rate = trial["settings"]["learning_rate"]
        assert any(rate == value * 2.0**k for value in grid["learning_rate"] for k in (-2, -1, 0, 1, 2))  # or refined
        assert all(trial["settings"][key] in values for key, values in grid.items() if key != "learning_rate")
    page = (EXAMPLES / "comparison.md").read_text()
    table = "\n".join(comparison.table(curves, comparison.baseline(curves, measure), measure))
    assert table in page
    example.main(["--report", "--figure", str(tmp_path / "curves.png")])
    assert table in capsys.readouterr().out and (tmp_path / "curves.png").stat().st_size > 10_000


def test_kfac_reaches_the_loss_of_the_others_in_a_third_of_their_steps(autoencoder, comparison):
    _, curves = kept(comparison, autoencoder.GRIDS, "autoencoder", "training")
    against = curves[comparison.baseline(curves, "training")][-1]
    assert comparison.first_at(curves["kfac"], "training", against["training"])["step"] < against["step"] / 3
