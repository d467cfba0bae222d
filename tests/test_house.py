"""The goals of `python tests/house.py` that are read from the source are kept."""

from pathlib import Path

import pytest

from . import house

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("figure", house.static_figures(ROOT), ids=lambda figure: figure.name)
def test_goal(figure):
    assert figure.today is not None, f"{figure.name}: nothing to measure {figure.note}"
    assert figure.today <= figure.goal, f"{figure.name}: {figure.today} {figure.note}" + "".join(
        f"\n  {place}" for place in figure.places
    )
