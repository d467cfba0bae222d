"""Computes lower bounds of the memory that a step needs, without compiling the step.

The temporary buffers of a step depend on the compiler. `plan` compiles the step and therefore
reports its actual memory.
"""

import dataclasses
import math

import jax

from ...models.adapters.lora import LoRAConfig, make_lora
from ...models.init import parameter_shapes
from ...models.registry import create
from ..config import TrainConfig
from ..optim.optimizer import make_optimizer

ACTIVATION = 2
"""Bytes of an activation, in bfloat16."""
GRADIENT = 4
"""Bytes of a gradient, in float32."""


@dataclasses.dataclass(frozen=True)
class LeastMemory:
    """Lower bounds of each device's memory, if all arrays are sharded over all devices."""

    parameters: int
    """The number of parameters of the model."""
    state: int
    """Bytes of parameters, optimizer state and gradients."""
    activations: int
    """Bytes of the inputs of all layers for one row, plus the bytes of the layer or embedding that
    is gathered on each device, and of its gradient."""

    @property
    def total(self) -> int:
        """The sum of `state` and `activations`, in bytes."""
        return self.state + self.activations


def least_memory(config: TrainConfig, num_devices: int) -> LeastMemory:
    """Returns lower bounds for a step with one row on each device and full rematerialization.

    Args:
        config: The run, with the final vocabulary size.
        num_devices: The number of devices. All arrays are sharded evenly over all devices.
    """
    model = create(config.model)
    shapes = parameter_shapes(model)
    trained, frozen = shapes, 0
    if config.lora is not None:
        lora = make_lora(config.lora, model)
        trained = jax.eval_shape(lambda params: lora.init(jax.random.key(0), params)[0], shapes)
        frozen = _numbers(shapes) * jax.numpy.dtype(config.lora.frozen_dtype).itemsize
    moments = jax.eval_shape(make_optimizer(config.optimizer, max(config.steps, 1)).init, trained)
    state = _bytes(trained) + _bytes(moments) + frozen + GRADIENT * _numbers(trained)
    sizes, layers = config.model, config.model.num_layers
    # The input of each layer is kept. The parameters of a layer or of the vocabulary, and their
    # gradients, are gathered while they are used.
    kept = config.data.lengths[0] * sizes.d_model * layers * ACTIVATION
    whole = max(_numbers(shapes.get("layers", shapes)) // layers, sizes.vocab_size * sizes.d_model)
    gathered = whole * (ACTIVATION + (0 if config.lora else GRADIENT))
    return LeastMemory(_numbers(shapes), math.ceil(state / num_devices), kept + gathered)


WAYS = {
    "AdamW": {},
    "AdamW, moments in 8 bits": {"optimizer": {"state_dtype": "int8"}},
    "LoRA of rank 8": {"lora": LoRAConfig(rank=8, frozen_dtype="bfloat16")},
}
"""Maps each training method to the settings that replace fields of a run's configuration."""


def trained_by(config: TrainConfig, way: str) -> TrainConfig:
    """Returns the configuration of a run that trains with one of the methods in `WAYS`."""
    settings = dict(WAYS[way])
    optimizer = dataclasses.replace(config.optimizer, **settings.pop("optimizer", {}))
    if "lora" in settings:  # adapters need a base
        settings["init_from"] = "base"
    return dataclasses.replace(config, optimizer=optimizer, **settings)


def _numbers(shapes: object) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def _bytes(shapes: object) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
