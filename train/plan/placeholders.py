"""Placeholders for values that only the data determine: vocabulary, labels and number of steps."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.common.errors import counted
from ...models.loading import model_config
from ...models.run_files import CONFIG_FILE
from ..config import TrainConfig, check_length, in_steps
from ..engine.policy.update import update_config
from ..objectives.online import OnlineConfig
from ..runs.init_from import head_parameters
from ..runs.run_folder import fit_model

if TYPE_CHECKING:
    from ...data.common.progress import LogFn  # imports rich, which `flaxzoo bench` does not need

ASSUMED_SIZES = {
    "characters": (256, "model.vocab_size"),
    "words": (30_000, "data.tokenizer.vocab_size"),
}
"""Maps each kind of tokenizer to the assumed size of its vocabulary and the option that sets a
different size. Only the text determines the real size."""
EXAMPLES_PER_EPOCH = 1 << 20
"""The assumed number of examples, for a run whose length is given in epochs. The learning rate and
the totals of such a run depend on the number of steps."""


def without_data(config: TrainConfig, log: "LogFn") -> TrainConfig:
    """Completes a run's configuration like data preparation, but with placeholders for the data.

    Args:
        config: The configuration from the recipe and the command line.
        log: Called with a line for each assumption.

    Returns:
        The configuration with a model that suits the data, with durations in steps, and without
        `init_from`.

    Raises:
        UserError: The examples are longer than the model's maximum.
        RunError: The initial model has no head for this kind of data.
    """
    # Use the sizes of the initial model if it is on this machine, but do not download it.
    initial_model = None
    if config.init_from is not None:
        folder = Path(config.init_from)
        if (folder / CONFIG_FILE).is_file():
            initial_model = model_config(folder)
        else:
            log(
                f"assumed: {config.init_from}, which is not on this machine, has the recipe's sizes"
            )
    vocab_size = 0 if initial_model is not None else _assumed_vocab_size(config, log)
    labels = config.data.assumed_labels()
    if labels:
        log(f"assumed: {counted(len(labels), 'label')}")
    config = fit_model(config, initial_model, vocab_size, labels)
    config = dataclasses.replace(config, init_from=None, init_step=None)
    if config.lora is not None:
        # A run also trains all parameters of the new head; see `run_folder`.
        also = dict.fromkeys((*config.lora.also_trained, *head_parameters(config.model)))
        lora = dataclasses.replace(config.lora, also_trained=tuple(also))
        config = dataclasses.replace(config, lora=lora)
    if not config.steps:
        log(f"assumed: {EXAMPLES_PER_EPOCH:,} examples in an epoch; --steps gives another length")
    config = in_steps(config, EXAMPLES_PER_EPOCH)
    check_length(config)
    # In reinforcement learning, the compiled step is the update on sampled completions.
    if isinstance(config.objective, OnlineConfig):
        config = update_config(config, config.objective)
        log(f"a step of the plan: an update on {config.batch_size:,} sampled answers")
    return config


def _assumed_vocab_size(config: TrainConfig, log: "LogFn") -> int:
    """Returns an estimate of the vocabulary size that data preparation would find."""
    tokenizer = config.data.tokenizer
    if tokenizer.path:
        log(f"assumed: {tokenizer.path} has at most {config.model.vocab_size:,} tokens")
    elif tokenizer.vocab_size is None and tokenizer.kind in ASSUMED_SIZES:
        size, option = ASSUMED_SIZES[tokenizer.kind]
        log(f"assumed: a vocabulary of {size:,} {tokenizer.kind} ({option} sets another number)")
        return size
    return tokenizer.vocab_size or 0
