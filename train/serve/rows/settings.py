"""The settings that determine how the texts of several requests are batched."""

import dataclasses

from ....data.common.fields import Checked, NonNegative, NonNegativeInt, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSettings(Checked):
    """The settings for batching texts."""

    rows: PositiveInt = 16
    """The number of texts that a language model generates at once. More rows take more memory."""
    batch_tokens: PositiveInt = 16_384
    """The maximum number of tokens, including padding, in the group of oldest waiting texts. Each
    batch is chosen from this group."""
    batch_wait: NonNegative = 0.003
    """The number of seconds that a text waits for other texts before it is embedded, scored or
    classified."""
    warm_up_length: NonNegativeInt = 64
    """Programs for texts of at most this number of tokens are compiled before the first request.
    With 0, the smallest number of programs is compiled. Programs that generate several texts at
    once are compiled while the server is idle. Programs for longer texts are compiled when such a
    text arrives."""
    warm_up_all: bool = False
    """Whether to compile the programs for all lengths of texts and for all settings of requests
    before the first request. By default, the log lists the programs that are compiled at their
    first use."""
    max_inputs: PositiveInt = 2048
    """The maximum number of texts in a request."""
