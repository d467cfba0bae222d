"""Array shapes and synthetic examples for planning a run without its data."""

import dataclasses

import jax
import numpy as np

from ...data.dataset import ArraySpec, BatchSpec, Values
from ..config import MeshConfig, TrainConfig, objective_of
from ..distributed.sharding import batch_sharding, make_mesh
from ..engine.compile import NumpyBatch, configured_step
from ..engine.sharded_step import ShardedStep
from .jaxpr_flops import matmul_flops

NUM_CHOICES = 4
"""The assumed number of choices per question. Only the data determine the real number."""


def example_spec(config: TrainConfig) -> BatchSpec:
    """Returns the arrays of one example, with the model's number of labels.

    In reinforcement learning, an example is a sampled completion.
    """
    return config.objective.batch_spec(config.data, len(config.model.labels), NUM_CHOICES)


def batch_shapes(config: TrainConfig, step: ShardedStep) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of a global batch with their shardings."""
    shapes = {}
    for name, spec in example_spec(config).items():
        shape = (config.batch_size, *spec.shape)
        sharding = batch_sharding(step.mesh, shape)
        shapes[name] = jax.ShapeDtypeStruct(shape, spec.dtype, sharding=sharding)
    return shapes


def model_flops(config: TrainConfig) -> int:
    """Returns the FLOPs of a step's matmuls over all devices, without recomputation."""
    plain = dataclasses.replace(
        config,
        # Trace XLA's attention, because a kernel would hide its matmuls. A loop over blocks of
        # experts would also hide its matmuls, because the router determines the number of
        # iterations.
        execution=dataclasses.replace(
            config.execution, remat="none", attention="xla", experts="ragged"
        ),
    )
    step = configured_step(plain, objective_of(plain), make_mesh(MeshConfig(), jax.devices()[:1]))
    return matmul_flops(step.trace(batch_shapes(plain, step)).jaxpr)


def synthetic_batch(config: TrainConfig, seed: int = 0) -> NumpyBatch:
    """Returns random examples. A step takes as long on synthetic examples as on real examples.

    Each example is a single text without padding, and the loss covers every possible position.
    """
    rng = np.random.default_rng(seed)
    # The number of different values that each kind of array may contain.
    sizes = {
        Values.SOURCE_TOKEN: config.model.input_vocab_size,
        Values.TARGET_TOKEN: config.model.vocab_size,
        Values.TOKEN_TYPE: max(config.model.num_token_types, 1),
        Values.INDEX: config.data.length,
    }

    def array(spec: ArraySpec) -> np.ndarray:
        shape = (config.batch_size, *spec.shape)
        if spec.values in (Values.SEGMENT, Values.MASK):
            return np.ones(shape, spec.dtype)
        if spec.values is Values.TEXT_POSITION:
            return np.broadcast_to(np.arange(shape[-1], dtype=spec.dtype), shape).copy()
        if spec.values is Values.LABEL and not spec.num_classes:
            # Without classes, the labels are scores.
            return rng.random(shape).astype(spec.dtype)
        return rng.integers(0, sizes.get(spec.values, spec.num_classes), shape).astype(spec.dtype)

    return {name: array(spec) for name, spec in example_spec(config).items()}
