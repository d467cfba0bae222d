"""The families of the lecture variants, and the axes of the parameters that only they have."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn

from ..config import TransformerConfig
from ..registry import AxisRules, Family

_LAYERS = r"((encoder|decoder)/)?layers"

LECTURE_AXES: AxisRules = {
    rf"{_LAYERS}/attention/(query|key|value)_convolution/taps": ("layers", None, "heads", None),
    rf"{_LAYERS}/attention/relative_(keys|values)/embedding": ("layers", None, None),
    rf"{_LAYERS}/((cross_)?attention|feed_forward)_residual/scalar": ("layers",),
}


def variant_of(
    family: Family, config: type[TransformerConfig], module: Callable[..., nn.Module]
) -> Family:
    """Returns the family of a lecture variant, which has no published sizes.

    Args:
      family: The family whose configuration and module the variant extends.
      config: The configuration of the variant.
      module: The Flax module of the variant.
    """
    return dataclasses.replace(
        family,
        config=config,
        module=module,
        presets={},
        num_parameters={},
        parameter_axes={**family.parameter_axes, **LECTURE_AXES},
    )
