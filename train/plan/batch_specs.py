"""A train step before there are any data: the arrays of its batch, and what it computes."""

import dataclasses
from typing import Any

import jax
import numpy as np

from ...data.tasks.batch_spec import RowShapes, row_shapes
from ..config import MeshConfig, TrainConfig
from ..distributed.sharding import batch_sharding, make_mesh
from ..engine.compile import MeshStep, NumpyBatch, mesh_step
from ..objectives.tasks import objective_of
from .jaxpr_flops import matmul_flops

NUM_CHOICES = 4
"""Of a question, which the data would tell."""


def _rows(config: TrainConfig) -> RowShapes:
    return row_shapes(config.data, len(getattr(config.model, "labels", ())), NUM_CHOICES)


def batch_shapes(config: TrainConfig, step: MeshStep) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a global batch, and where they lie."""
    return {
        name: jax.ShapeDtypeStruct(
            (rows := (config.batch_size, *shape)), dtype, sharding=batch_sharding(step.mesh, rows)
        )
        for name, (shape, dtype) in _rows(config).items()
    }


def model_flops(config: TrainConfig) -> int:
    """Operations of all matrix products of a step over all devices, without recomputation."""
    plain = dataclasses.replace(
        config,
        # Of XLA's attention every product is in sight.
        execution=dataclasses.replace(config.execution, remat="none", attention="xla"),
        optimizer=dataclasses.replace(config.optimizer, state_memory="device"),
    )
    step = mesh_step(plain, objective_of(plain), make_mesh(MeshConfig(), jax.devices()[:1]))
    return matmul_flops(step.trace(batch_shapes(plain, step)).jaxpr)


def synthetic_batch(config: TrainConfig, seed: int = 0) -> NumpyBatch:
    """Rows full of random tokens: what a step takes as long over as over real ones.

    Each is one whole text: nothing is padded, and all that can be predicted is.
    """
    rng = np.random.default_rng(seed)
    shapes = _rows(config)

    def array(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        whole = (config.batch_size, *shape)
        if name.endswith(("segment_ids", "_mask", "_weights")):
            return np.ones(whole, dtype)
        if name.endswith("position_ids"):
            return np.broadcast_to(np.arange(shape[-1], dtype=dtype), whole).copy()
        return rng.integers(0, _bound(name, shape, config), whole).astype(dtype)

    return {name: array(name, *x) for name, x in shapes.items()}


def _bound(name: str, shape: tuple[int, ...], config: TrainConfig) -> int:
    """What the numbers of an array stay below."""
    model: Any = config.model
    of_words = config.data.kind in ("causal", "pretraining", "translation")
    if name == "input_ids":
        return getattr(model, "source_vocab_size", None) or model.vocab_size
    if name in ("decoder_input_ids", "masked_labels") or (name == "labels" and of_words):
        return model.vocab_size
    if name.endswith("_positions"):
        return config.data.length
    if name == "token_type_ids":
        return max(model.num_token_types, 1)
    return 2  # labels and choices
