"""Converts parameters to a layout that is fast for decoding."""

import dataclasses
from typing import Any

import jax

from ..init import parameter_shapes
from ..model import Model
from ..nn.typing import Params
from ..registry import create


def unstack_layers(model: Model, params: Params) -> tuple[Model, Params]:
    """Converts a model and its parameters to a layout for decoding one token at a time.

    In this layout, each layer has a separate subtree, and each kernel is a matrix
    `[outputs, inputs]`. In the layout for training, each use of a layer's parameters copies a slice
    of a stacked array. The copies are negligible in a training step, but on a CPU they take ten
    times as long as the computation of one token.

    Args:
      model: a model with stacked layers, or a model that already has this layout.
      params: its parameters, which are copied.

    Returns:
      The model with `execution.layers` "separate", and its parameters.
    """
    if model.execution.layers == "separate":
        return model, params
    execution = dataclasses.replace(model.execution, layers="separate", remat="none")
    separate = create(model.config, execution)
    shapes = parameter_shapes(separate)
    return separate, jax.tree_util.tree_map_with_path(_lay_out, _unstack(params), shapes)


def _unstack(params: Params) -> Params:
    """Splits every stack `layers`, also in an encoder, into `layers_0`, `layers_1`, etc."""
    result = {}
    for name, tree in params.items():
        if name == "layers":
            for i in range(jax.tree.leaves(tree)[0].shape[0]):
                result[f"layers_{i}"] = jax.tree.map(lambda x, i=i: x[i], tree)
        else:
            result[name] = _unstack(tree) if isinstance(tree, dict) else tree
    return result


def _lay_out(path: tuple[Any, ...], x: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Reshapes a kernel `[*inputs, *outputs]` to `[outputs, inputs]`; keeps other parameters."""
    if path[-1].key != "kernel":
        return x
    outputs, inputs = target.shape
    return x.reshape(inputs, outputs).T
