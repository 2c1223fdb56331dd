"""Test `examples/physics` on tiny sizes: the equations, the exact solutions, and every method."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.examples


@pytest.fixture
def pinn(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "physics"))
    import pinn

    with jax.enable_x64(True):
        yield pinn


def test_exact_solutions_solve_the_equations_and_others_do_not(pinn):
    for problem in pinn.PROBLEMS.values():
        x = pinn.points(problem, 0, 20)
        # Move away from the start time, where the transformation for Burgers' equation has no derivative.
        x = x.at[:, 0].add(0.05 * (1 - x[:, 0]))
        known = () if problem.coefficient is None else (0.1,)
        wrong = tuple(2 * c for c in known)
        residual = jax.vmap(lambda x, problem=problem, known=known: problem.residual(problem.exact, x, *known))
        other = jax.vmap(
            lambda x, problem=problem, wrong=wrong: problem.residual(lambda x: (2 + x[0]) * problem.exact(x), x, *wrong)
        )
        assert np.abs(residual(x)).max() < 1e-6 * np.abs(other(x)).max()


def test_the_laplacian_is_that_of_the_hessian(pinn):
    import equations

    x, u = jnp.asarray([0.3, 0.6, 0.2]), lambda x: jnp.sin(x[0] * x[1]) + x[2] ** 3 * x[0]
    assert float(equations.laplacian(u, x)) == pytest.approx(float(jnp.trace(jax.hessian(u)(x))), rel=1e-12)


def test_points_lie_inside_and_on_the_faces(pinn):
    for problem in pinn.PROBLEMS.values():
        x = np.asarray(pinn.points(problem, 0, 50))
        assert (x > problem.low).all() and (x < problem.high).all()
        edge = np.asarray(pinn.points(problem, 1, 50, faces=True))
        assert not problem.faces or all(any(row[axis] == value for axis, value in problem.faces) for row in edge)


def test_every_method_comes_nearer(pinn, monkeypatch, tmp_path, capsys):
    problem = pinn.PROBLEMS["Poisson, 2 dimensions"]._replace(inner=30, edge=12, widths=(8, 8))
    monkeypatch.setattr(pinn, "PROBLEMS", {"small": problem})
    results, picture = tmp_path / "results.jsonl", tmp_path / "picture.png"
    # Self-scaled Broyden is in a package of its own.
    methods = [name for name in pinn.SETTINGS if name != "ssbroyden"]
    options = ["--seconds", "0.3", "--seed", "0", "--results", str(results), "--methods", *methods]
    pinn.main(["run", *options])
    rows = results.read_text()
    for row in map(json.loads, rows.splitlines()):
        assert 0 < row["error"] < 0.9 and row["steps"] > 0 and row["curve"][-1][0] >= 0.3, row["method"]
    pinn.main(["run", *options])
    assert results.read_text() == rows
    capsys.readouterr()
    pinn.main(["report", *options, "--figure", str(picture)])
    assert capsys.readouterr().out.count("|") > 2 * len(methods)
    assert picture.stat().st_size > 0


def test_recorded_results_have_every_method(pinn):
    rows = pinn.read(Path(pinn.__file__).with_name("results.jsonl"))
    found = {(row["problem"], row["method"]) for row in rows}
    for problem in pinn.PROBLEMS:
        assert {method for title, method in found if title == problem} >= set(pinn.SETTINGS) - {"ssbroyden"}
