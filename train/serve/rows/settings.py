"""The settings that determine how the texts of several requests are batched."""

import dataclasses

from ....data.common.fields import Checked, NonNegative, NonNegativeInt, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSettings(Checked):
    """The settings of batches."""

    rows: PositiveInt = 16
    """The number of texts that a language model generates at once. More rows take more memory."""
    batch_tokens: PositiveInt = 16_384
    """The maximum total number of tokens, including padding, of the oldest waiting texts. Each
    batch is chosen from these texts."""
    batch_wait: NonNegative = 0.003
    """Seconds that a text waits for other texts before it is embedded, scored or classified."""
    warm_up_length: NonNegativeInt = 64
    """Programs for texts of at most this many tokens are compiled before the first request; 0
    compiles the fewest programs. Programs that generate several texts at once are compiled while
    the server is idle. A longer text compiles a program when it arrives."""
    warm_up_all: bool = False
    """Compile the programs for texts of any length and for all settings of requests before the
    first request. By default, the log lists the programs that compile at first use."""
    max_inputs: PositiveInt = 2048
    """The maximum number of texts of a request."""
