"""Parameters laid out for decoding instead of training."""

import dataclasses
from typing import Any

import jax

from ..init import parameter_shapes
from ..registry import create


def separate_layers(model: Any, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model and its parameters, laid out for decoding a token at a time.

    Each layer has its own subtree and each kernel is a matrix `[outputs, inputs]`.
    A slice of a stacked array is a copy each time it is used: nothing beside a
    training step, but ten times the work of one token on a CPU.

    Args:
      model: a model with stacked layers, or one that is laid out so already.
      params: its parameters; they are copied.

    Returns:
      The model with `execution.layers` "separate", and its parameters.
    """
    if model.execution.layers == "separate":
        return model, params
    execution = dataclasses.replace(model.execution, layers="separate", remat="none")
    separate = create(model.config, execution)
    shapes = parameter_shapes(separate)
    return separate, jax.tree_util.tree_map_with_path(_lay_out, _unstack(params), shapes)


def _unstack(params: dict[str, Any]) -> dict[str, Any]:
    """Every stack `layers`, an encoder's or a model's own, as `layers_0`, `layers_1` and so on."""
    result = {}
    for name, tree in params.items():
        if name == "layers":
            for i in range(jax.tree.leaves(tree)[0].shape[0]):
                result[f"layers_{i}"] = jax.tree.map(lambda x, i=i: x[i], tree)
        else:
            result[name] = _unstack(tree) if isinstance(tree, dict) else tree
    return result


def _lay_out(path: tuple[Any, ...], x: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    """A kernel `[*inputs, *outputs]` as `[outputs, inputs]`; anything else as it is."""
    if path[-1].key != "kernel":
        return x
    outputs, inputs = target.shape
    return x.reshape(inputs, outputs).T
