"""The common type of the models of all families."""

from typing import Protocol, runtime_checkable

from .config import Execution, TransformerConfig
from .nn.typing import PyTree


@runtime_checkable
class Model(Protocol):
    """A Flax module of any family, as `models.create` returns it."""

    @property
    def config(self) -> TransformerConfig:
        """The sizes and the head of the model."""
        ...

    @property
    def execution(self) -> Execution:
        """How the model is run. These settings do not change the model."""
        ...

    def apply(self, variables: PyTree, *args: object, **kwargs: object) -> PyTree:
        """Runs the model with its variables, `{"params": params}`, on input arrays."""
        ...
