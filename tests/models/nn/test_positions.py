"""Positions: counted, as vectors."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.nn.positions import default_positions


def test_default_positions():
    def positions(start, length, mask=None, segments=None):
        start = jnp.asarray(start)
        mask, segments = (None if x is None else jnp.array([x]) for x in (mask, segments))
        return default_positions(start, length, mask, segments)[0].tolist()

    assert positions(0, 4) == [0, 1, 2, 3]
    assert positions(3, 2) == [3, 4]
    assert positions(0, 5, mask=[0, 0, 1, 1, 1]) == [0, 0, 0, 1, 2]
    assert positions(3, 2, mask=[0, 0, 1, 1, 1]) == [1, 2]
    assert positions(0, 5, mask=[1, 1, 0, 0, 0])[:2] == [0, 1]
    assert positions(0, 7, segments=[1, 1, 1, 2, 3, 3, 0]) == [0, 1, 2, 0, 0, 1, 0]


@pytest.mark.parametrize("base", [10_000.0, 100_000.0])
@pytest.mark.parametrize("width", [8, 7])
def test_sinusoidal_positions(base, width):
    table = models.sinusoidal_positions(50, width, base)
    assert (table.shape, table.dtype) == ((50, width), np.float32)
    for p in (0, 1, 49):
        for d in range(width):
            angle = p / base ** (2 * (d // 2) / width)
            assert table[p, d] == pytest.approx([math.sin, math.cos][d % 2](angle), abs=1e-6)


def test_position_base_reaches_the_model(tiny):
    ids = np.arange(12)[None]
    usual, wide = (
        tiny(positions="sinusoidal", position_base=base).logits(input_ids=ids)
        for base in (10_000.0, 100_000.0)
    )
    assert np.abs(usual - wide).max() > 1e-3


def test_every_dimension_has_its_wavelength():
    """The formula of lecture 001 as printed, with exponent i/d for odd i too."""
    table = models.sinusoidal_positions(3, 4, 100_000.0, "per_dimension")
    np.testing.assert_allclose(table[1], [0.841471, 0.998419, 0.003162, 1.0], atol=5e-7)
    np.testing.assert_allclose(table[2], [0.909297, 0.993682, 0.006325, 1.0], atol=5e-7)
    usual = models.sinusoidal_positions(3, 4, 100_000.0)
    np.testing.assert_allclose(usual[1:, 1], [0.540302, -0.416147], atol=5e-7)


def test_binary_positions_are_the_printed_table():
    printed = """
        0000 0001 0010 0011 0100 0101 0110 0111 1000 1001 1010 1011 1100 1101 1110 1111
    """.split()
    rows = models.binary_positions(16, 4)
    assert ["".join(str(int(bit)) for bit in row) for row in rows] == printed
