"""How many figures are near, at least: whoever changes costs sees here what became of them.

Traces are not there. The whole is what `shiftjax reproduce` says, but for them.
"""

import pytest

from shiftjax.reproduce.figures import Figure, Options, count
from shiftjax.reproduce.run import results_of

LEAST = {"shift": (57, 19, 31), "arctic": (32, 7, 14)}
"""Quick: figures that are compared, within 15%, within 25%."""
WHOLE = {"shift": (81, 24, 46), "arctic": (32, 9, 16)}


def counted(paper, options):
    return count(each for each in results_of(paper, options) if isinstance(each, Figure))


@pytest.mark.costs(8)
@pytest.mark.parametrize("paper", LEAST)
def test_so_many_are_near(paper):
    compared, near, fair = LEAST[paper]
    found = counted(paper, Options(quick=True))
    assert found.compared >= compared
    assert found.near >= near, str(found)
    assert found.fair >= fair, str(found)


@pytest.mark.thorough
@pytest.mark.parametrize("paper", WHOLE)
def test_so_many_of_all_are_near(paper):
    compared, near, fair = WHOLE[paper]
    found = counted(paper, Options())
    assert found.compared >= compared
    assert found.near >= near, str(found)
    assert found.fair >= fair, str(found)
