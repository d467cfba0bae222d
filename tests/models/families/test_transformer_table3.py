"""What the notes of the Transformer's presets say is what the models have."""

import dataclasses
import re

import jax
import pytest
from flaxzoo import models
from flaxzoo.models.init import parameter_shapes

PRESETS = {name: p for name, p in models.presets().items() if name.startswith("transformer-")}


def in_millions(config, vocab_size):
    model = models.create(dataclasses.replace(config, vocab_size=vocab_size))
    return f"{sum(x.size for x in jax.tree.leaves(parameter_shapes(model))) / 1e6:.0f}M"


@pytest.mark.parametrize("name", PRESETS)
def test_notes_state_the_computed_parameter_counts(name):
    preset = PRESETS[name]
    counts = [in_millions(preset.config, 37_000), in_millions(preset.config, 41_100)]
    assert preset.config.vocab_size == 37_000
    assert re.findall(r"[\d.]+M", preset.note) == counts
    assert counts[0] != preset.published  # else there were nothing to note
    assert (counts[1] == preset.published) == (name not in NOT_AS_PRINTED)


NOT_AS_PRINTED = {"transformer-big", "transformer-learned"}
"""With 41,100 tokens either; all other rows are."""


def test_there_is_a_preset_for_each_row_of_table_3():
    assert len(PRESETS) == 16
    assert PRESETS.keys() > NOT_AS_PRINTED
