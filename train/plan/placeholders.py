"""What a run would learn of its data, and a plan has to take as given."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ...models.load import CONFIG_FILE, model_config
from ..config import TrainConfig, check_length, in_steps
from ..runs.run_folder import fit_model

NUM_CHARACTERS = 256
"""A vocabulary of characters, which only the text would tell."""
ROWS_PER_EPOCH = 1 << 20
"""Of runs counted in epochs: of the schedule alone."""


def without_data(config: TrainConfig, say: Callable[[str], None]) -> TrainConfig:
    """A run as it would be once its data were read, with what only they tell taken as given.

    Args:
      config: as the recipe and the command line give it.
      say: told what was assumed, a line each.

    Raises:
      UserError: the rows are longer than what the model can read.
      RunError: there is no such head for such data.
    """
    tokenizer = config.data.tokenizer
    vocab_size = tokenizer.vocab_size or 0
    if tokenizer.kind == "characters" and not tokenizer.path:
        vocab_size = NUM_CHARACTERS
        say(f"assumed: a vocabulary of {vocab_size} characters (give --model.vocab-size for more)")
    elif tokenizer.path:
        say(f"assumed: {tokenizer.path} has at most {config.model.vocab_size:,} tokens")
    begin = None
    if config.init_from is not None:
        folder = Path(config.init_from)
        if (folder / CONFIG_FILE).is_file():
            begin = model_config(folder)
        else:
            say(f"assumed: {config.init_from}, which is not here, has the recipe's sizes")
    labels = config.data.assumed_labels()
    if labels:
        say(f"assumed: {len(labels)} {'labels' if len(labels) > 1 else 'label'}")
    config = fit_model(config, begin, vocab_size, labels)
    config = in_steps(dataclasses.replace(config, init_from=None, init_step=None), ROWS_PER_EPOCH)
    check_length(config)
    return config
