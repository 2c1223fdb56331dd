"""Test `examples/language_model/ladder.py`: runs resume and are not repeated, and searches end inside their grid."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.examples

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "language_model"
TOY = "--width 16 --blocks 2 --context 8 --vocabulary 300 --tokens 32 --steps 12".split()


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        module = importlib.import_module("ladder")
        written = sorted(FOLDER.glob("*.py"))
        patch.setattr(module.sources, "ONE_IN", 5)
        patch.setattr(module.sources, "files", lambda: {path.name: path for path in written})
        patch.setattr(module, "VALIDATION", 128)
        module.text = tmp_path_factory.mktemp("text")
        module.sources.tokens(module.text / "tokens-300.npz", 300)
        yield module


def main(ladder, action, folder, *arguments):
    (folder / "tokens-300.npz").exists() or (folder / "tokens-300.npz").symlink_to(ladder.text / "tokens-300.npz")
    files = "--folder", str(folder), "--results", str(folder / "results.jsonl"), "--figure", str(folder / "figure.png")
    ladder.main([action, *TOY, *files, *map(str, arguments)])


def rows(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "method",
    ["kfac", "muon --adam 0.3", "soap", "adamw", "kfac --rules tokens=0.3", "muon --decay 0.1", "kfac --rotary"],
)
def test_train_resumes_a_stopped_run(ladder, tmp_path, method):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, stops in ((whole, [12]), (parts, [5, 12, 12])):
        folder.mkdir()
        for stop in stops:
            main(ladder, "run", folder, "--method", *method.split(), "--stop", stop)
    seconds = {"processor_seconds": 0}
    assert [row | seconds for row in rows(parts)] == [row | seconds for row in rows(whole)]
    assert [row["step"] for row in rows(whole)] == list(range(1, 13))
    # Without the saved state, a run starts again, but stores no row twice.
    if method == "kfac":
        next(parts.glob("ladder-*.npz")).unlink()
        (parts / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(parts)[:3]))
        main(ladder, "run", parts)
        assert [row["validation"] for row in rows(parts)] == [row["validation"] for row in rows(whole)]


@pytest.mark.parametrize("method", ["kfac", "muon", "soap"])
def test_decay_shrinks_kernels_only(ladder, method):
    rung = ladder.Rung(16, 2, 8, 300, 32, 12)
    rate = 0.1 * float(ladder.kfac.schedules.warmup_linear_decay(1.0, 12)(0))
    assert rate > 0
    params = ladder.at_start(rung, 0)
    tokens = np.arange(36).reshape(4, 9)
    after = []
    for decay in (0.0, 0.5):
        init, observe, step, _ = ladder.programs(rung, method, (), decay)
        state = init(params)
        if observe is not None:
            state = observe(state, params, tokens)
        after.append(step(ladder.jax.tree.map(ladder.jnp.copy, params), state, tokens, 0.1, 1.0)[0])
    for path, leaf in ladder.jax.tree_util.tree_leaves_with_path(params):
        without, decayed = (ladder.jax.tree_util.tree_flatten_with_path(tree)[0] for tree in after)
        difference = dict(without)[path] - dict(decayed)[path]
        expected = 0 if ladder.by_adam(path, leaf) else rate * 0.5 * leaf
        np.testing.assert_allclose(difference, np.broadcast_to(expected, leaf.shape), atol=1e-6)


def test_kernel_facts(ladder):
    before = {kind: np.tile(np.diag([4.0, 2.0, 1.0]), (2, 1, 1)) for kind in ladder.KINDS}
    after = {kind: kernels + np.diag([1.0, 0.0, 1.0]) for kind, kernels in before.items()}
    facts = ladder.kernel_facts(before, after, None)["up"]
    assert facts == {"stable_rank": 2, "frobenius": pytest.approx((2 / 21) ** 0.5, rel=1e-3), "spectral": 0.25}


@pytest.mark.parametrize(("form", "kernels"), [([], 4), (["--split"], 6)], ids=["fused", "split"])
def test_multipliers(ladder, tmp_path, form, kernels):
    main(ladder, "run", tmp_path, "--rate", 0.1, *form)
    for row in rows(tmp_path):
        assert len(row["kernels"]) == kernels
        assert all(1 <= facts["multiplier"] <= 4 for facts in row["kernels"].values())


def test_search(ladder, tmp_path, monkeypatch):
    tried = []

    def train(run, stop, store):
        tried.append((run.rate, run.adam))
        return abs(np.log(run.rate / 0.0613)) + abs(np.log(run.adam / 0.11))

    monkeypatch.setattr(ladder, "train", train)
    rung = ladder.Rung(16, 2, 8, 300, 32, 12)
    best = ladder.search(ladder.Run(rung, "muon", 0.03), 12, None)
    assert (best.rate, best.adam) == (0.06, 0.1)
    assert {(0.03, 0.1), (0.12, 0.1), (0.06, 0.03), (0.06, 0.3)} <= set(tried)
    assert ladder.search(ladder.Run(rung, "kfac", 0.03), 12, None).rate == 0.06


def test_report_and_plot(ladder, tmp_path, capsys):
    rung = ladder.Rung(16, 2, 8, 300, 32, 12, "bfloat16")
    losses = {("kfac", 0.1): [6, 5, 4, 3], ("muon", 0.03): [6, 5, 4.5, 4.5], ("muon", 0.06): [6, 6, 6, 6]}
    lines = []
    for (method, rate), curve in losses.items():
        for step, loss in zip((3, 6, 9, 12), curve, strict=True):
            facts = {"kernels": {kind: {"stable_rank": 3.0} for kind in ladder.KINDS}}
            row = ladder.Run(rung, method, rate).row() | {"step": step, "validation": loss} | facts
            lines.append(json.dumps(row) + "\n")
    # Rules do not compete, and a run that stopped early does not shorten the comparison.
    slower = ladder.Run(rung, "kfac", 0.1, rules=(("tokens", 0.3),))
    lines.append(json.dumps(slower.row() | {"step": 12, "validation": 1.0}) + "\n")
    lines.append(json.dumps(ladder.Run(rung, "kfac", 0.2).row() | {"step": 3, "validation": 1.0}) + "\n")
    # Weight decay has rows of its own.
    decayed = ladder.Run(rung, "kfac", 0.1, decay=0.02)
    lines.append(json.dumps(decayed.row() | {"step": 12, "validation": 2.0}) + "\n")
    (tmp_path / "results.jsonl").write_text("".join(lines))
    main(ladder, "report", tmp_path)
    table = capsys.readouterr().out
    assert "| 16 | 2 | 8 | 300 | 32 | 12 | bfloat16 | yes | no | 0 | 12 | kfac | 0.1 |  | 0 | 3.000 | |  |" in table
    assert "| muon | 0.03 | 1 | 0 | 4.500 | +1.500 | 4 |" in table
    assert "| kfac | 0.1 |  | 0.02 | 2.000 | |  |" in table
    assert "| 16 | 2 | 8 | 300 | 32 | 12 | bfloat16 | yes | no | 0 | tokens=0.3 | 0.1 | 0 | 12 | 1.000 |" in table
    main(ladder, "leads", tmp_path)
    row = "| 16 | 2 | 8 | 32 | 12 | bfloat16 | 3.000 | 4.500 | 0.03, 0.03 | 1 of 4 | 1.500 | 4, 38% |"
    assert row in capsys.readouterr().out
    main(ladder, "plot", tmp_path)
    assert (tmp_path / "figure.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--method muon --rules tokens=0.3", "--rules is for --method kfac"),
        ("--adam 0.3", "--adam is for --method muon and soap"),
        ("--method adamw --decay 0.1", "--decay is for kfac, muon and soap"),
        ("--tokens 33", "not a multiple of --context 8"),
        ("--steps 48 --stop 5", "--stop 5 is not a multiple of 4"),
    ],
)
def test_main_refuses_arguments_without_effect(ladder, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(ladder, "run", tmp_path, *arguments.split())
    assert message in capsys.readouterr().err


def test_leads_are_those_of_the_page(ladder, capsys):
    ladder.main(["leads"])
    table = capsys.readouterr().out
    assert table.count("\n") > 15
    assert table in (FOLDER / "README.md").read_text()
