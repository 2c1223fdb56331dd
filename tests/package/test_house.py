"""Test that the package passes the checks in house.py, and that house.py counts correctly."""

import pytest

import house


@pytest.fixture(scope="module")
def found():
    return house.modules()


@pytest.mark.parametrize("rule", house.broken([]))
def test_the_package_has_nothing_broken(found, rule):
    assert not house.broken(found)[rule]


def test_the_table_has_every_room(found):
    rows = house.table(found)
    assert all(f"  {room} (" in rows for room in {module.room for module in found})


SOURCE = '''"""A docstring
of two lines."""

from kfac._layers import Layer  # no module of this house: a name in one
from kfac._capture import trace, find

# A comment.


def outer(eqn: Any, layer: Layer, other=None):
    """A docstring."""

    def inner():
        return eqn.params, layer.params, eqn.invars[0]

    return """a string
of two lines"""
'''


def test_it_counts_what_it_says():
    module = house.measure("_statistics.rows", SOURCE, {"_layers", "_capture", "_capture.trace", "_statistics.rows"})
    assert len(module.lines) == 7
    assert module.tokens == 52
    assert (module.arguments, module.untyped) == (2, 1)
    assert module.functions == {"outer:10": 5, "inner:13": 2}
    assert module.equations == ["eqn.params:14", "eqn.invars:14"]
    assert module.imports == {"_layers", "_capture", "_capture.trace"}
    assert house.upward([module]) == [
        "_statistics.rows imports _capture",
        "_statistics.rows imports _capture.trace",
    ]


def test_an_f_string_is_one_token_in_every_version_of_python():
    source = 'x = f"{a} is {b!r:>{width}}" + f"{f\'{c}\'}" + "d"\n'
    assert house.count_code(source, house.ast.parse(source)) == (7, {1})


def test_it_finds_circles_and_rooms_without_a_place():
    names = {"_layers", "_capture.trace", "_capture.taps", "curvature"}
    sources = {
        "_layers": "import numpy",
        "_capture.trace": "from kfac._capture import taps",
        "_capture.taps": "import kfac._capture.trace",
        "curvature": "from kfac._capture.taps import Tap",
    }
    found = [house.measure(name, source, names) for name, source in sources.items()]
    assert house.circle(found) == ["_capture.taps", "_capture.trace"]
    assert not house.circle(found[:1]) and not house.upward(found)
    with pytest.raises(ValueError, match="cellar has no place in ROOMS"):
        house.floor("cellar")


def test_it_knows_what_names_the_inside():
    for line in ("import kfac._factors", "from kfac import _checks", "from kfac.planning._estimate import estimate"):
        assert house.names_the_inside(line)
    for line in ("kfac.__version__", "kfac._NAME", "from kfac.types import Layer", "import test_kfac_"):
        assert not house.names_the_inside(line)
