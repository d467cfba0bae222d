"""The parts of every front end that takes texts: a model, its parameters and its tokenizer."""

from collections.abc import Container
from pathlib import Path
from typing import ClassVar, TypeVar

from ...data.common.progress import LogFn
from ...data.tasks.translation import start_and_end
from ...data.tokenizers.base import Tokenizer
from ..config import TransformerConfig
from ..finite import load_finite
from ..model import Model
from ..nn.heads import HEADS, require_head
from ..nn.typing import Params
from .folder import open_folder, target_start, vocabulary_note

COMMANDS = {
    "feature-extraction": "embed",
    "fill-mask": "fill-mask",
    "text-generation": "generate",
    "translation": "translate",
}
"""The command for models of each of the hub's tasks; for any other it is `predict`."""
Opened = TypeVar("Opened", bound="TextModel")


class TextModel:
    """A model with its tokenizer; a subclass says which heads it takes and what it does.

    Args:
        model: the model.
        params: its parameters.
        tokenizer: its tokenizer.

    Raises:
        UserError: the model has none of `heads`.
    """

    heads: ClassVar[Container[str | None]]
    """Heads that a model may have."""
    refusal: ClassVar[str]
    """The task that a model with another head cannot do, with a verb: "fills no masks"."""
    remedy: ClassVar[str]
    """An imperative that says what to give instead."""
    _stored_start: tuple[int, ...] | None = None

    def __init__(self, model: Model, params: Params, tokenizer: Tokenizer) -> None:
        require_head(model.config, self.heads, self.refusal, self.remedy)
        self._model, self._params, self._tokenizer = model, params, tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._tokenizer

    @property
    def _target_start(self) -> tuple[int, ...]:
        """The tokens that an encoder-decoder reads before a target; see `target_start`."""
        return self._stored_start or start_and_end(self._tokenizer)[:1]

    @property
    def max_length(self) -> int:
        """The number of tokens that the model reads."""
        return self._model.config.max_length

    @classmethod
    def of_run(
        cls: type[Opened],
        folder: str | Path,
        *,
        step: int | None = None,
        log: LogFn | None = None,
        max_length: int | None = None,
    ) -> Opened:
        """Opens the model of a run folder.

        Args:
            folder: a run folder, one in Hugging Face's form, or a name on the hub.
            step: which checkpoint; by default the newest.
            log: called with a line if the tokenizer may be another model's.
            max_length: the longest input that the model is to read, in tokens, if not its own; for
              positions that are no table.

        Raises:
            FileNotFoundError: it is not a run folder, or has no such checkpoint.
            UserError: its model has another head, a parameter is NaN or infinite, its stored
              settings are not supported, or `max_length` differs from its table of positions.
        """
        config, tokenizer = open_folder(folder)
        remedy = f"{cls.remedy}, or use the command {_command(config)}"
        require_head(config, cls.heads, cls.refusal, remedy)
        note = vocabulary_note(folder, config, tokenizer)
        if note is not None and log is not None:
            log(note)
        model, params = load_finite(folder, step=step, max_length=max_length)
        opened = cls._open(model, params, tokenizer, folder)
        if config.head == "seq2seq_lm":
            opened._stored_start = target_start(folder, tokenizer)
        return opened

    @classmethod
    def _open(
        cls: type[Opened], model: Model, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> Opened:
        """Makes the front end; overridden by those that read more of the folder."""
        del folder
        return cls(model, params, tokenizer)


def _command(config: TransformerConfig) -> str:
    """Returns the command for models with this head."""
    return COMMANDS.get(HEADS[config.head].hub_task, "predict")
