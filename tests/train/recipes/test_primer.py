"""The recipe with Primer's changes: what it differs in from the one beside it."""

import dataclasses

import jax
from flaxzoo import models, train
from flaxzoo.models.init import parameter_shapes


def test_it_differs_from_the_quickstart_in_two_settings_only():
    primer, plain = train.recipe("primer-quickstart"), train.recipe("quickstart")
    changed = models.LectureGPTConfig(
        **vars(plain.model) | {"activation": "relu_squared", "head_convolution": 3}
    )
    assert primer == dataclasses.replace(plain, model=changed)

    def count(model):
        return sum(x.size for x in jax.tree.leaves(parameter_shapes(models.create(model))))

    # Three taps of three projections for each channel of each layer.
    sizes = plain.model
    assert count(primer.model) - count(sizes) == 3 * 3 * sizes.d_model * sizes.num_layers
