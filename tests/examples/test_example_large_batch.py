"""Test the study of optimizers at large batches: it resumes, reports stored results, and gives short errors."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kfac

pytestmark = pytest.mark.examples

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "large_batch"


@pytest.fixture(scope="module", autouse=True)
def path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Return results of a search that was stopped after two trials, killed within a line, and resumed."""
    import study

    folder = tmp_path_factory.mktemp("study")
    args = ["search", "--task", "toy", "--methods", "sgd", "--results", str(folder)]
    study.main([*args, "--limit", "2"])
    path = folder / "toy.jsonl"
    first = path.read_text()
    path.write_text(first + first[:50])
    study.main(args)
    return folder, first


def test_a_killed_search_goes_on_where_it_was(searched):
    folder, first = searched
    text = (folder / "toy.jsonl").read_text()
    assert first.count("\n") == 2
    assert text.startswith(first)
    records = [json.loads(line) for line in text.splitlines()]
    keys = [json.dumps([r["method"], r["settings"], r["steps"], r["seed"]], sort_keys=True) for r in records]
    assert len(set(keys)) == len(keys)
    # The records are the grid of six, rates beyond its edges, and the best two once more.
    assert len(records) >= 8
    assert {r["steps"] for r in records} == {2, 4}
    assert all(len(r["losses"]) == r["steps"] for r in records if r["finite"])


def test_the_report_comes_from_what_is_stored(searched, tmp_path, capsys):
    import study

    folder, _ = searched
    study.main(["report", "--task", "toy", "--results", str(folder), "--figures", str(tmp_path)])
    printed = capsys.readouterr().out
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


def test_what_is_wrong_is_said_in_one_sentence(monkeypatch):
    import study
    from files import UserError

    monkeypatch.chdir(FOLDER)
    for args, message in WRONG:
        with pytest.raises(UserError) as caught:
            study.main(args)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_line_is_named(tmp_path):
    """Run the script in a process of its own."""
    (tmp_path / "toy.jsonl").write_text('{"task": 1}\n{}\n')
    command = [sys.executable, FOLDER / "study.py", "report", "--task", "toy", "--results", tmp_path]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "toy.jsonl, line 1, is no trial" in done.stderr


def test_the_budget_that_reaches_the_target_is_interpolated():
    import study  # noqa: F401, I001  before its neighbour, as a script
    import reporting

    def group(steps, *scores):
        return [{"steps": steps, "val_accuracy": x} for x in scores]

    assert reporting.crossing([group(40, 0.4, 0.4), group(90, 0.6, 0.6)], 0.5) == pytest.approx((60, 0))
    assert reporting.crossing([group(40, 0.4, 0.4)], 0.5) == (math.inf, 40.0)


@pytest.fixture(scope="module")
def networks():
    """Load the script by its path, because the tests have a module with the same name."""
    spec = importlib.util.spec_from_file_location("networks_of_the_study", FOLDER / "networks.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def test_bracket_is_closed_only_between_neighbours_within_the_factor():
    import brackets

    assert brackets.bracket({0.01: 1.0, 0.03: 2.0, 0.1: 1.5}).missing() == [0.015, 0.06]
    assert brackets.bracket({0.015: 1.0, 0.03: 2.0, 0.06: 1.5}) == (0.015, 0.03, 0.06)
    assert brackets.bracket({0.015: 1.0, 0.03: 2.0, 0.06: 3.0}).missing() == [0.12]
    rows = [{"rate": 0.1, "score": 3.0}, {"rate": 0.1, "score": None}, {"rate": 0.05, "score": 1.0}]
    assert brackets.mean_scores(rows) == {0.05: 1.0, 0.1: -math.inf}


def test_search_halves_and_doubles_until_the_best_rate_is_bracketed(networks, tmp_path, monkeypatch):
    ran = []

    def run(problem, method, rate, seed, steps, schedule):
        ran.append((method, rate, seed))
        return {"score": -abs(math.log(rate / (0.1 if method == "muon" else 0.05)))}

    monkeypatch.setattr(networks, "run", run)
    same = {"network": "network", "steps": 2, "batch": 10, "schedule": "falling"}
    trials = networks.Trials([], tmp_path / "rows.jsonl", None, same)
    networks.search(trials, "muon", [0.025], [0, 1])
    assert [rate for _, rate, seed in ran if seed == 0] == [0.025, 0.0125, 0.05, 0.1, 0.2]
    assert [rate for _, rate, seed in ran if seed == 1] == [0.1]
    del ran[:]
    networks.search(trials, "muon-adam-1", [1.0], [0])
    assert [rate for _, rate, _ in ran] == [0.05, 0.1, 0.2, 0.025]
    stored = networks.read(tmp_path / "rows.jsonl")
    assert len(stored) == 10 and networks.verdict([r for r in stored if r["method"] == "muon"]) == "best: 0.1"


def test_report_names_no_best_rate_at_the_edge_of_a_grid(networks, capsys):
    rows = [{"network": "MLP-Mixer", "method": "muon", "rate": rate, "seed": 0, "score": rate} for rate in (0.1, 0.2)]
    networks.report(rows)
    printed = capsys.readouterr().out
    assert "at the edge: 0.2, 0.4 did not run" in printed and "best" not in printed


@pytest.mark.parametrize("methods", [("muon",), pytest.param(("kfac", "soap"), marks=pytest.mark.slow)], ids=", ".join)
def test_the_networks_are_trained_once_with_a_method_and_a_rate(networks, tmp_path, monkeypatch, capsys, methods):
    def printed(*args):
        monkeypatch.setattr(sys, "argv", ["networks.py", *map(str, args)])
        networks.main()
        return capsys.readouterr().out

    results = tmp_path / "networks.jsonl"
    args = ("--networks", "character transformer", "--steps", 3, "--rates", 0.03, "--results", results)
    args += ("--methods", *methods, "--batch", 50, "--schedule", "average")
    printed("run", *args)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(records) == len(methods) and all(math.isfinite(record["score"]) for record in records)
    assert {(record["batch"], record["schedule"]) for record in records} == {(50, "average")}
    assert all(record["processor_seconds"] > 0 and record["compile_seconds"] > 0 for record in records)
    assert not printed("run", *args)
    assert re.search(methods[0] + r" \d+ ms", printed("times", *args))
    stored = printed("report")
    assert re.search(r"\n  kfac-frobenius-cholesky .* 0.06: 0.4956 ", stored)


def test_steps_to_a_target_at_several_batch_sizes(tmp_path, monkeypatch, capsys):
    name = "vision transformer"
    ran = []

    def run(problem, method, rate, seed, steps, schedule):
        ran.append((problem, method, rate, steps, seed))
        # At the best rate, 0.4 at N/10, the target of 0.4 takes 100 steps. This rate lies beyond the first three
        # rates. At N/4, no trial reaches the target, and the loss becomes non-finite at large rates.
        if problem == 4:
            return {"score": None if rate > 0.1 else 0.3}
        return {"score": 0.004 * steps * (1 if math.isclose(rate, 0.4) else rate) * (1 + seed / 10)}

    stub = SimpleNamespace(run=run, PROBLEMS={name: lambda folder, share: share}, NEWTON={})
    monkeypatch.setitem(sys.modules, "networks", stub)  # the tests have a module of this name, too
    monkeypatch.delitem(sys.modules, "batch_sizes", raising=False)
    import batch_sizes

    results = tmp_path / "batch_sizes.jsonl"
    options = ["--networks", name, "--methods", "kfac", "--shares", "4", "10", "--results", str(results)]
    options += ["--figure", str(tmp_path / "figure.png")]
    batch_sizes.main(["run", *options])
    assert len(ran) == len(set(ran)) == len(results.read_text().splitlines())
    batch_sizes.main(["run", *options])
    assert len(ran) == len(set(ran))
    capsys.readouterr()
    batch_sizes.main(["report", *options])
    printed = capsys.readouterr().out
    assert "| N/10 | 99 (0.4) |" in printed  # interpolated over the logarithm
    assert "| N/4 | more than 160 (" in printed
    assert (tmp_path / "figure.png").is_file()
    at_first = len(ran)
    batch_sizes.main(["run", *options, "--shares", "10", "--seeds", "0", "1"])
    assert {(rate, seed) for *_, rate, _, seed in ran[at_first:]} == {(0.4, 1)}
    batch_sizes.main(["report", *options])
    assert "| N/10 | 94 ± 6 (0.4) |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no complete search"):
        batch_sizes.main(["report", *options, "--methods", "muon"])
    results.write_text(results.read_text() + "{")
    with pytest.raises(SystemExit, match=r"batch_sizes.jsonl, line \d+, is no trial"):
        batch_sizes.main(["report", *options])


@pytest.fixture(scope="module")
def held_out_data(tmp_path_factory):
    """Write random arrays in the shapes of the held-out data, whose downloads would take three minutes."""
    folder = tmp_path_factory.mktemp("held_out")
    rng = np.random.default_rng(0)
    files = {
        "molecules": {"atoms": rng.integers(1, 11, (8100, 32)), "bonds": rng.integers(0, 4, (8100, 32, 32), np.int8),
                      "points": rng.normal(size=8100)},
        "spelling": {"letters": rng.integers(1, 27, (1800, 12)), "sounds": rng.integers(0, 40, (1800, 12))},
        "speech": {"sounds": rng.normal(size=(1300, 50, 40)), "labels": rng.integers(0, 20, 1300)},
        "digits": {"pixels": rng.uniform(size=(8100, 14, 14)), "labels": rng.integers(0, 10, 8100)},
        "bible": {"words": rng.integers(0, 2048, (12_100, 64))},
        "languages": {"letters": rng.integers(0, 64, (4800, 12)), "labels": rng.integers(0, 10, 4800)},
    }  # fmt: skip
    for name, arrays in files.items():
        held = {key: x.astype(np.float32) if x.dtype == np.float64 else x.astype(np.int32) for key, x in arrays.items()}
        np.savez(folder / f"{name}.npz", **held)
    return folder


HELD_OUT_SIZES = {
    "molecules": 88_641,
    "breast cancer": 35_585,
    "spelling to sounds": 242_345,
    "flow of patches": 154_252,
    "speech": 129_140,
    "digits": 26_298,
    "masked words": 368_448,
    "languages": 126_666,
}


def test_held_out_networks_are_the_eight_of_the_page(networks):
    assert networks.HELD_OUT.keys() == {f"held out: {name}" for name in HELD_OUT_SIZES}
    page = (FOLDER / "HELD_OUT.md").read_text()
    for (name, size), network in zip(HELD_OUT_SIZES.items(), networks.HELD_OUT.values(), strict=True):
        (row,) = re.findall(rf"\n\| {name}: .*", page)
        assert f"| {size:,} |" in row and f"| {network.steps} |" in row


@pytest.mark.parametrize("name", HELD_OUT_SIZES)
def test_held_out_problem_has_exact_statistics_and_a_finite_loss(networks, held_out_data, name):
    make, _, steps, _ = networks.HELD_OUT[f"held out: {name}"]
    problem = make(held_out_data, 100)
    params, state = problem.init(jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == HELD_OUT_SIZES[name]
    batch = next(problem.batches(0, steps))
    layers = kfac.find_layers(problem.loss, params, state, *batch, has_aux=True, strict=True)
    assert layers.num_examples == len(batch[0])
    loss, _ = jax.jit(problem.loss)(params, state, *batch)
    assert math.isfinite(loss)


@pytest.fixture
def regression(networks):
    """Return a small regression problem with a kernel of 4 x 16, a bias and a kernel of 16 x 1."""
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))

    def init(key):
        first, second = jax.random.normal(key, (4, 16)) / 2, jax.random.normal(key, (16, 1)) / 4
        return {"first": first, "bias": jnp.zeros(16), "second": second}, {}

    def loss(params, state, x, y):
        hidden = jnp.tanh(x @ params["first"] + params["bias"])
        return jnp.mean((hidden @ params["second"] - y) ** 2), state

    def batches(seed, steps):
        return iter([(x, y)] * steps)

    return networks.Problem(init, loss, batches, lambda params, state: -float(loss(params, state, x, y)[0]))


@pytest.mark.parametrize("method", ["no-statistics", "soap-spectral", "muon-adaptive"])
def test_programs_of_an_ablation_reduce_the_loss(networks, regression, method):
    assert networks.programs(regression, method, None).observe is None
    begin = regression.score(*regression.init(jax.random.key(0)))
    found = networks.run(regression, method, 0.1, 0, 40, "falling")
    assert found["score"] > begin / 2


def test_spectral_step_has_the_spectral_norm_of_a_kernel_in_kfac():
    import ablations

    matrix = np.random.default_rng(0).normal(size=(6, 24)).astype(np.float32)
    step = ablations.spectral_step(jnp.asarray(matrix), overlap=9.0)
    assert np.linalg.norm(step, 2) == pytest.approx(6.0, rel=0.05)
    np.testing.assert_allclose(step / matrix, step[0, 0] / matrix[0, 0], rtol=1e-5)
    np.testing.assert_allclose(ablations.vector_step(jnp.array([3.0, 0.0, -4.0])) ** 2, [0.0072, 0, 0.0128], rtol=1e-5)


def test_adaptive_rates_grow_where_the_loss_falls_along_the_last_update_and_never_below_one():
    import ablations

    tx = ablations.adaptive_rates(optax.sgd(0.1), lambda count: 0.1)
    params = {"flat": jnp.ones(3), "sharp": jnp.ones(3)}
    state = tx.init(params)
    for step in range(20):
        sign = (-1.0) ** step
        updates, state = tx.update({"flat": jnp.ones(3), "sharp": sign * jnp.ones(3)}, state, params)
    assert state.multipliers["flat"] == 4 and state.multipliers["sharp"] == 1
    np.testing.assert_allclose(updates["flat"], -0.4, rtol=1e-6)


def test_first_step_runs_the_first_command_of_the_readme():
    words = ["first-step", "--networks", "the README's first command", "--methods", "adamw"]
    script = str(FOLDER / "networks.py")
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) > 0
