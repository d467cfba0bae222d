"""The mixin for layers of the lecture variants, which is the first base class of such a layer."""

from typing import ClassVar, cast

import flax.linen as nn

from ..config import Execution
from ..nn.attention import MultiHeadAttention
from ..nn.dropout import RowKeys, dropout
from ..nn.stack import Config, Layer, LayerContext, LayerInputs, LayerOutputs
from ..nn.typing import Array, Float
from .attention import LectureAttention
from .options import LectureOptions
from .positions import LecturePositions


class ScaledSum(nn.Module):
    """Adds a sublayer's output, multiplied by a learned scalar, to the residual stream."""

    execution: Execution

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns x + scalar · y."""
        scalar = self.param("scalar", nn.initializers.ones, (), self.execution.param_dtype)
        return x + scalar.astype(y.dtype) * y


class LectureLayer(Layer[Config]):
    """Adds positions to the input of the layer, and scales the outputs of its sublayers.

    Example::

        class LecturePreNormLayer(LectureLayer[GPTConfig], PreNormLayer):
            ...
    """

    attention: ClassVar[type[MultiHeadAttention]] = LectureAttention

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        positions = cast(LecturePositions, context.positions)
        x = positions.at_layer(x, inputs.index)
        return super().__call__(x, inputs, context)

    def add(
        self, x: Float[Array, "B T D"], y: Float[Array, "B T D"], name: str, rng: RowKeys | None
    ) -> Float[Array, "B T D"]:
        """Returns x + scalar · y, after dropout of y.

        With `config.residual_scalar`, the scalar is learned. Its initial value is 1, which leaves
        the sum unscaled. A scalar of 0 removes the sublayer. Without `config.add_residual`, returns
        y after dropout.
        """
        options = cast(LectureOptions, self.config)
        if not options.add_residual:
            return dropout(y, self.config.dropout_rate, rng, name)
        if not options.residual_scalar:
            return super().add(x, y, name, rng)
        # Apply dropout first, as in other layers; the scalar multiplies the result.
        y = dropout(y, self.config.dropout_rate, rng, name)
        return ScaledSum(self.execution, name=f"{name}_residual")(x, y)
