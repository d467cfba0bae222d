"""The hyperparameters of the optimizer. The fields are options of the command line."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from ..data.common.errors import UserError
from ..data.common.fields import (
    Checked,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    Range,
    Rate,
    require,
)

OptimizerName = Literal["adamw", "lamb", "adafactor", "muon"]
StateDtype = Literal["float32", "bfloat16", "bfloat16_stochastic", "int8"]
ScheduleName = Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"]
EmaDecay = Annotated[float, Range(above=0, below=1)]
LayerDecay = Annotated[float, Range(above=0, most=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked):
    """The settings of AdamW (Loshchilov & Hutter 2019) or a different update rule.

    The other update rules are LAMB (You et al. 2020), Adafactor (Shazeer & Stern 2018) and Muon
    (Jordan et al. 2024).

    Raises:
        UserError: a number is out of range, a name is unknown, or a pattern is invalid.
    """

    name: OptimizerName = "adamw"
    """The update rule. lamb: AdamW's update, scaled by the norm of each parameter array, for large
    batches. adafactor: no first moment, a second moment that is factored into rows and columns, and
    learning rates relative to the parameters. muon: orthogonal updates for the matrices inside
    layers, and AdamW for all other parameters."""
    peak_learning_rate: Positive
    """The largest learning rate of the run, reached at the end of the warm-up."""
    schedule: ScheduleName = "cosine"
    """The decay of the learning rate after the warm-up. wsd: constant until the last
    `decay_fraction` of the run, then linear."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up of the learning rate, from 0 to the peak."""
    warmup_fraction: Rate = 0.0
    """Length of the warm-up as a fraction of the run, if `warmup_steps` is 0."""
    final_fraction: NonNegative = 0.1
    """Learning rate of the last step divided by the peak (linear, cosine and wsd)."""
    decay_fraction: Fraction = 0.2
    """Length of the decay in the schedule wsd, as a fraction of the run."""
    beta1: Rate = 0.9
    """Decay of the first moment, which is the running mean of the gradient."""
    adafactor_momentum: bool = False
    """Whether Adafactor also keeps a first moment, with decay beta1."""
    muon_beta: Rate = 0.95
    """Decay of Muon's momentum. beta1 and beta2 apply to the parameters that AdamW updates."""
    beta2: Rate = 0.95
    """Decay of the second moment, which is the running mean of the squared gradient. Adafactor uses
    1 - step^-0.8 instead."""
    epsilon: Positive = 1e-8
    """ε, which is added to the square root of the second moment in the denominator of the
    update."""
    state_dtype: StateDtype = "float32"
    """Precision of the two moments of AdamW and LAMB. float32: 8 bytes per parameter. bfloat16: 6
    bytes, the first moment in bfloat16. bfloat16_stochastic: 4 bytes, both moments in bfloat16 with
    stochastic rounding. int8: about 2.1 bytes, both moments in int8 with a scale per block. Muon
    stores one moment per matrix instead of two, and therefore needs half as many bytes.
    """
    weight_decay: NonNegative = 0.1
    """Weight decay of matrices. Biases and the scales of norms have no weight decay."""
    max_gradient_norm: Positive | None = 1.0
    """The largest global norm of the gradients; larger gradients are scaled down to this norm. If
    None, gradients are not clipped."""
    layer_decay: LayerDecay = 1.0
    """Learning rate of each layer divided by the learning rate of the layer above it. The head has
    the full rate."""
    ema_decay: EmaDecay | None = None
    """Decay of an exponential moving average of the parameters, such as 0.999. Evaluations measure
    this average in addition to the last parameters, and the option `--ema` of other commands uses
    it. If None, no average is kept."""
    frozen: Sequence[str] = ()
    """Patterns of parameters to freeze, such as `.*embedding.* layers/[0-5]`: regular expressions
    that must match the whole path of a parameter, of a module of the model, or of a layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        momentum = self.adafactor_momentum
        require(
            self.state_dtype == "float32" or self.name != "adafactor" or momentum,
            f"optimizer.state_dtype {self.state_dtype} has no effect, because adafactor keeps no "
            "moment of a parameter's size: leave it out, or keep a first moment "
            "(--optimizer.adafactor-momentum)",
        )
        require(
            self.name == "adafactor" or not momentum,
            f"optimizer.adafactor_momentum requires optimizer.name adafactor, got "
            f"{self.name}: leave it out",
        )
        # Check only the syntax here. Whether a pattern matches depends on the parameters, which do
        # not exist yet.
        for pattern in self.frozen:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(
                    f"optimizer.frozen {pattern!r} is not a regular expression: {error}"
                ) from None
