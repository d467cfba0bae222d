"""Exports the forward pass as StableHLO, which any program with jax can run without flaxzoo.

`jax.export` makes the program portable between versions and platforms. Batch size and lengths are
symbolic.
"""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from .config import TransformerConfig
from .heads.specs import HEADS
from .init import parameter_shapes
from .nn.typing import Array, Params

PLATFORMS = ("cpu", "cuda", "tpu")


def export_forward(model: nn.Module) -> bytes:
    """Returns a model's forward pass, without dropout, as a serialized program.

    Args:
      model: The module of the model. The parameters are arguments of the program.

    Returns:
      The bytes that `jax.export.deserialize` reads. The arguments of the program are a flat dict of
      the parameters by path, and int32 arrays by name, with any batch size and any lengths up to
      `max_length`. The program returns a dict of arrays.
    """

    def forward(params: Params, **arrays: Any) -> dict[str, Array]:
        # Return a flat dict of arrays, which can be read without a class of flaxzoo.
        names = ("last_hidden_state", "pooler_output", *HEADS[model.config.head].output_names)
        output = model.apply({"params": unflatten_dict(params, sep="/")}, **arrays)
        return {name: x for name in names if (x := getattr(output, name, None)) is not None}

    params = flatten_dict(parameter_shapes(model), sep="/")
    exported = jax.export.export(jax.jit(forward), platforms=PLATFORMS)
    return bytes(exported(params, **_inputs(model.config)).serialize())


def input_names(config: TransformerConfig) -> list[str]:
    """Returns the input names of a model's exported program."""
    return list(_inputs(config))


def _inputs(config: TransformerConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the inputs. Each letter in a shape is a symbolic size."""
    head = HEADS[config.head]
    # The letters are the numbers of sequences (b), choices (c), tokens (t) and target tokens (u).
    shape = "bct" if head.takes_choices else "bt"
    shapes = {"input_ids": shape, "attention_mask": shape}
    if config.num_token_types:
        shapes["token_type_ids"] = shape
    if head.name == "seq2seq_lm":
        shapes["decoder_input_ids"] = "bu"
    letters = sorted(set("".join(shapes.values())))
    # The bounds let the exporter compare symbolic sizes with static sizes.
    limits = [f"{letter} >= 1" for letter in letters]
    limits += [f"{letter} <= {config.max_length}" for letter in letters if letter in "tu"]
    sizes = jax.export.symbolic_shape(", ".join(letters), constraints=limits)
    size_of = dict(zip(letters, sizes, strict=True))
    return {
        name: jax.ShapeDtypeStruct(tuple(size_of[letter] for letter in shape), np.int32)
        for name, shape in shapes.items()
    }
