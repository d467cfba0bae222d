"""Computes the tensors of Hugging Face files from parameters."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import jax
import numpy as np

from .layout import Shape
from .mapping import TensorMapping, TensorRule

HostOrDeviceArray: TypeAlias = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class ExportedTensor:
    """A Hugging Face tensor that is computed from parameters when it is written."""

    name: str
    shape: Shape
    make: Callable[[], np.ndarray]


def export_tensors(
    mapping: TensorMapping, params: Mapping[str, HostOrDeviceArray]
) -> Iterator[ExportedTensor]:
    """Yields every tensor of a model.

    Args:
      mapping: The tensor mapping of the model.
      params: Its parameters, by their paths.

    Raises:
      WeightsError: The mapping and the model do not have the same parameters.
    """
    mapping.check_paths(params.keys())
    for rule in mapping.rules:
        yield from rule_tensors(rule, params)
    # Some redundant tensors must be in the files, because transformers expects them.
    for ignored in mapping.ignored:
        if ignored.exported:
            yield ExportedTensor(ignored.hf, ignored.value().shape, ignored.value)


def rule_tensors(
    rule: TensorRule, params: Mapping[str, HostOrDeviceArray]
) -> Iterator[ExportedTensor]:
    """Yields the tensors of a rule, given the parameters by their paths."""

    def make(index: tuple[int, ...]) -> np.ndarray:
        # Copy only one layer, or one expert of a layer, from the device at a time.
        arrays = [np.asarray(params[path][index]) for path in rule.flax]
        return np.ascontiguousarray(rule.layout.join(arrays))

    shapes = [params[path].shape for path in rule.flax]
    for index, (name, shape) in zip(rule.indices(shapes), rule.tensors(shapes), strict=True):
        yield ExportedTensor(name, shape, functools.partial(make, index))
