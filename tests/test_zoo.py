"""Every model of the zoo is right, or refused by an error that leads on."""

import pytest

from zoo import BROKEN, ZOO
from zoo.specimens import check, check_refused

pytestmark = pytest.mark.usefixtures("x64")


def cases(refused):
    found = []
    for name, case in ZOO.items():
        if bool(case.refused) == refused:
            marks = [pytest.mark.xfail(strict=True, reason=BROKEN[name])] if name in BROKEN else []
            found.append(pytest.param(case, id=name.replace(" ", "-"), marks=marks))
    return found


@pytest.mark.parametrize("case", cases(refused=False))
def test_statistics_are_those_of_brute_force(case):
    check(case)


@pytest.mark.parametrize("case", cases(refused=True))
def test_a_refusal_names_the_parameter_and_a_way_out(case):
    check_refused(case)
