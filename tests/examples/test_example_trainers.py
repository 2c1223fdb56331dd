"""Test `examples/trainers/flax_fit.py`: flax's own training steps with K-FAC."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples


@pytest.fixture
def flax_fit(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "trainers"))
    import flax_fit

    yield flax_fit
    sys.modules.pop("flax_fit")


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_kfac_trains_digits_in_flax(flax_fit, library, capsys):
    assert flax_fit.main([library, "--steps", "20"]) > 0.9
    assert "step  10  loss" in capsys.readouterr().out


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_the_training_step_also_serves_adamw(flax_fit, library):
    _, losses = flax_fit.FITS[library]("adamw", 0.01, 10, 0)
    assert losses[-1] < losses[0]


def test_bad_numbers_of_steps_end_with_a_message(flax_fit, capsys):
    with pytest.raises(SystemExit):
        flax_fit.main(["nnx", "--steps", "0"])
    assert "--steps must be at least 1" in capsys.readouterr().err
