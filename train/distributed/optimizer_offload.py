"""Optimizer state that lies in the host's memory between steps.

A step brings the moments to the devices and takes them back when they are updated: what they
take there at the peak is the compiler's choice, and the way costs time.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax

from ...data.common.errors import UserError
from ...models.nn.typing import Array, Key
from ..state import Metrics, StepFn, TrainState

HOST = "pinned_host"
"""The name that jax has for the memory of a host that its devices can read."""


@runtime_checkable
class Memory(Protocol):
    """A memory that a device reads."""

    @property
    def kind(self) -> str:
        """The name that jax has for such memories."""
        ...


@runtime_checkable
class DeviceOfHost(Protocol):
    """A device of this process."""

    @property
    def device_kind(self) -> str:
        """The name of its model."""
        ...

    def addressable_memories(self) -> Sequence[Memory]:
        """Returns the memories that it reads."""
        ...


def on_host(state: TrainState, shardings: TrainState, device: DeviceOfHost) -> TrainState:
    """`shardings` with the moments in the memory of the devices' hosts.

    Numbers that are no arrays, the counts of steps, stay where they are.

    Args:
        state: shapes.
        shardings: where they lie on the devices.
        device: one of them, of this process.

    Raises:
        UserError: it reaches no such memory.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise UserError(
            f"optimizer.state_memory host: {device.device_kind} reaches no memory of its host "
            f"(only {', '.join(kinds)}): leave it out (--optimizer.state-memory device)"
        )
    opt_state = jax.tree.map(
        lambda x, lies: lies.with_memory_kind(HOST) if x.ndim else lies,
        state.opt_state,
        shardings.opt_state,
    )
    return dataclasses.replace(shardings, opt_state=opt_state)


def from_host_and_back(step: StepFn, device: TrainState, host: TrainState) -> StepFn:
    """A step whose state comes from the host and goes back to it.

    Args:
        step: with everything on the devices.
        device: shardings of the state within the step.
        host: the same between steps, from `on_host`.
    """

    def offloaded(
        state: TrainState, batch: Mapping[str, Array], rng: Key[Array, ""]
    ) -> tuple[TrainState, Metrics]:
        brought = jax.device_put(state.opt_state, device.opt_state)
        state, metrics = step(dataclasses.replace(state, opt_state=brought), batch, rng)
        taken = jax.device_put(state.opt_state, host.opt_state)
        return dataclasses.replace(state, opt_state=taken), metrics

    return offloaded
