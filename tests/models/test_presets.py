"""Every published size, through shapes alone: nothing is allocated."""

import re

import jax
import jax.numpy as jnp
import pytest
from flaxzoo import models

# (V, P, L, D, N) from section 4.1 (GPT), table 2 (GPT-2) and table 2.1 (GPT-3) of the papers.
SIZES = {
    "gpt": (40478, 512, 12, 768, 12),
    "gpt2": (50257, 1024, 12, 768, 12),
    "gpt2-medium": (50257, 1024, 24, 1024, 16),
    "gpt2-large": (50257, 1024, 36, 1280, 20),
    "gpt2-xl": (50257, 1024, 48, 1600, 25),
    "gpt3-small": (50257, 2048, 12, 768, 12),
    "gpt3-medium": (50257, 2048, 24, 1024, 16),
    "gpt3-large": (50257, 2048, 24, 1536, 16),
    "gpt3-xl": (50257, 2048, 24, 2048, 16),  # table: 24 heads of 128
    "gpt3-2.7b": (50257, 2048, 32, 2560, 32),
    "gpt3-6.7b": (50257, 2048, 32, 4096, 32),
    "gpt3-13b": (50257, 2048, 40, 5120, 40),  # table: width 5,140
    "gpt3-175b": (50257, 2048, 96, 12288, 96),
}


def count(config):
    model = models.create(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), input_ids=jnp.zeros((1, 1), int))
    return sum(x.size for x in jax.tree.leaves(shapes["params"]))


def test_every_preset_is_checked_here():
    assert models.presets().keys() == SIZES.keys()


@pytest.mark.parametrize("name", SIZES)
def test_parameter_count(name):
    preset, (V, P, L, D, N) = models.presets()[name], SIZES[name]
    config = preset.config
    assert (config.vocab_size, config.max_length, config.num_layers) == (V, P, L)
    assert (config.d_model, config.num_heads) == (D, N)
    # Four projections and two feed-forward matrices with biases, two norms.
    layer = 4 * (D * D + D) + (D * 4 * D + 4 * D) + (4 * D * D + D) + 2 * 2 * D
    final_norm = 0 if name == "gpt" else 2 * D
    total = V * D + P * D + L * layer + final_norm
    assert count(config) == total

    number, unit = re.fullmatch(r"([\d.]+)([MB])", preset.published).groups()  # type: ignore[union-attr]
    digits = len(number.partition(".")[2])
    as_printed = f"{total / {'M': 1e6, 'B': 1e9}[unit]:.{digits}f}"
    if as_printed != number:
        # The paper's own table is inconsistent: the note says so and gives our count.
        assert f"{as_printed}{unit}" in preset.note
        assert name in {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-medium"}


def test_where_the_architectures_differ():
    gpt, gpt2, gpt3 = (models.preset(name) for name in ("gpt", "gpt2", "gpt3-175b"))
    assert (gpt.norm_position, gpt2.norm_position, gpt3.norm_position) == ("post", "pre", "pre")
    assert (gpt.local_window, gpt2.local_window, gpt3.local_window) == (None, None, 256)
    assert (gpt.scale_residual_init, gpt2.scale_residual_init) == (False, True)
    for c in (gpt, gpt2, gpt3):
        assert (c.activation, c.use_bias, c.positions) == ("gelu_tanh", True, "learned")
        assert c.norm_eps == 1e-5


@pytest.mark.parametrize("name", ["gpt3-xl", "gpt3-13b"])
def test_impossible_rows_of_table_2_1_are_noted(name):
    assert "table 2.1" in models.presets()[name].note
    assert models.preset(name).head_dim == 128
