"""Placeholders for what a run would learn from its data: vocabulary, labels and number of steps."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ...models.loading import CONFIG_FILE, model_config
from ..config import TrainConfig, check_length, in_steps
from ..runs.run_folder import fit_model

if TYPE_CHECKING:
    from ..progress import LogFn  # needs rich, which `flaxzoo bench` does without

NUM_CHARACTERS = 256
"""Assumed size of a vocabulary of characters, which only the text would tell."""
EXAMPLES_PER_EPOCH = 1 << 20
"""Assumed for runs that count in epochs; only the learning rate schedule depends on it."""


def without_data(config: TrainConfig, log: "LogFn") -> TrainConfig:
    """Completes a run's configuration as preparing it would, with placeholders for its data.

    Args:
        config: As the recipe and the command line give it.
        log: Receives a line on each assumption.

    Returns:
        The configuration with a model that suits the data, counted in steps, without `init_from`.

    Raises:
        UserError: The examples are longer than the model's maximum.
        RunError: The model has no head for this kind of data.
    """
    tokenizer = config.data.tokenizer
    vocab_size = tokenizer.vocab_size or 0
    if tokenizer.kind == "characters" and not tokenizer.path:
        vocab_size = NUM_CHARACTERS
        log(f"assumed: a vocabulary of {vocab_size} characters (give --model.vocab-size for more)")
    elif tokenizer.path:
        log(f"assumed: {tokenizer.path} has at most {config.model.vocab_size:,} tokens")
    initial_model = None
    if config.init_from is not None:
        folder = Path(config.init_from)
        if (folder / CONFIG_FILE).is_file():
            initial_model = model_config(folder)
        else:
            log(f"assumed: {config.init_from}, which is not here, has the recipe's sizes")
    labels = config.data.assumed_labels()
    if labels:
        log(f"assumed: {len(labels)} {'labels' if len(labels) > 1 else 'label'}")
    config = fit_model(config, initial_model, vocab_size, labels)
    config = dataclasses.replace(config, init_from=None, init_step=None)
    config = in_steps(config, EXAMPLES_PER_EPOCH)
    check_length(config)
    return config
