"""The goals of `python tests/house.py` are kept."""

from pathlib import Path

import pytest

from . import house

ROOT = Path(__file__).parent.parent


def check(figure: house.Figure) -> None:
    assert figure.today is not None, f"{figure.name}: nothing to measure {figure.note}"
    assert figure.today <= figure.goal, f"{figure.name}: {figure.today} {figure.note}" + "".join(
        f"\n  {place}" for place in figure.places
    )


@pytest.mark.parametrize("figure", house.static_figures(ROOT), ids=lambda figure: figure.name)
def test_goal_read_from_the_source(figure):
    check(figure)


@pytest.mark.slow
def test_goal_of_files_that_a_batch_passes_through():
    check(house.path_figure(ROOT))
