"""Test `examples/language_model/decoder.py`: its text, its subwords, and that a stopped run resumes exactly."""

import importlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.examples

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "language_model"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        module = importlib.import_module("decoder")
        written = sorted(FOLDER.glob("*.py")) + sorted((FOLDER.parent / "imagenet").glob("*.py"))
        patch.setattr(module.sources, "ONE_IN", 5)
        patch.setattr(module.sources, "files", lambda: {path.name: path for path in written})
        module.kept = tmp_path_factory.mktemp("text") / "tokens.npz"
        module.text = module.sources.tokens(module.kept, 400)
        yield module


def test_the_tokens_are_the_text(decoder):
    text, found = decoder.text, decoder.sources.files()
    assert text.files == len(found) and text.size == sum(path.stat().st_size for path in found.values())
    spelled = [b"".join(text.pieces[k] for k in part) for part in (text.train, text.held_out)]
    assert sum(map(len, spelled)) == text.size and len(text.train) < 0.6 * len(spelled[0])
    for path in found.values():
        assert sum(path.read_bytes() in part for part in spelled) == 1


def test_the_most_frequent_pair_comes_first(decoder):
    merges = decoder.sources.learn(Counter({b"abab": 3, b"abc": 2, b"xyz": 7}), 259)
    assert merges == {(97, 98): 256, (120, 121): 257, (257, 122): 258}  # ab 8, xy 7, xyz 7
    np.testing.assert_array_equal(decoder.sources.encode([b"abc ab", b"xyx"], merges), [256, 99, 32, 256, 257, 120])


@pytest.mark.parametrize("method", ["kfac", "kfac --hidden 0.2 --rate 0.2", "muon"])
def test_a_stopped_run_goes_on(decoder, tmp_path, method):
    small = ["--size", "toy", "--sequences", "4", "--horizon", "4", "--every", "2", "--tokens", str(decoder.kept)]
    found = {}
    for name, stops in (("whole", [[]]), ("parts", [["--stop", "2"], []])):
        own = ["--output", str(tmp_path / name), "--results", str(tmp_path / f"{name}.jsonl")]
        for stop in stops:
            decoder.main(["run", "--method", *method.split(), *small, *own, *stop])
        found[name] = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    for key in ("step", "validation", "loss"):
        assert [row[key] for row in found["whole"]] == [row[key] for row in found["parts"]]
    assert found["whole"][1]["loss"] < found["whole"][0]["loss"]


def test_what_is_reported(decoder, tmp_path, capsys):
    run = {"size": "5M", "sequences": 16, "horizon": 20, "method": "muon", "rate": 0.1, "seed": 0, "compiling": 3.0}
    curve = [(10, 6.0, 5.0), (20, 5.5, 9.0), (20, 5.0, 10.0)]  # step 20 was repeated after a stop
    lines = (run | {"step": step, "validation": low, "processor_seconds": s} for step, low, s in curve)
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    decoder.main(["report", "--results", str(results), "--figure", str(tmp_path / "curves.png")])
    assert "| 5M | 2,048 | 20 | muon | 0.1 | 1.0 | 5.000 | 10 | 3 |" in capsys.readouterr().out
    assert (tmp_path / "curves.png").is_file()
    (found,) = decoder.by_run(results).values()
    there = decoder.curves.reached(found, "validation", 5.5, falls=True)
    assert there["step"] == 15 and decoder.curves.reached(found, "validation", 4.0, falls=True) is None


def test_slower_blocks_are_for_kfac_alone(decoder, capsys):
    with pytest.raises(SystemExit):
        decoder.main(["run", "--method", "muon", "--hidden", "0.2"])
    assert "--hidden 0.2 is for --method kfac" in capsys.readouterr().err
