"""The base class of all classes that apply a model with its tokenizer to texts."""

from collections.abc import Collection, Container
from pathlib import Path
from typing import ClassVar, TypeAlias, TypeVar

from ...data.common.errors import UserError
from ...data.common.progress import LogFn, ignore
from ...data.tasks.translation import start_and_end
from ...data.tokenizers.base import Tokenizer
from ..config import TransformerConfig
from ..finite import load_finite
from ..heads.specs import HEADS, require_head
from ..model import Model
from ..nn.typing import Params
from .folder import open_folder, target_start, vocabulary_note

COMMANDS = {
    "feature-extraction": "embed",
    "fill-mask": "fill-mask",
    "text-generation": "generate",
    "translation": "translate",
}
"""Maps a task on the hub to the command that runs its models. All other tasks have `predict`."""
Opened = TypeVar("Opened", bound="TextModel")
Loaded: TypeAlias = tuple[Model, Params]
"""A model and its parameters."""


def require_texts(texts: object, name: str, other: type = str) -> None:
    """Checks that an argument is a list of texts.

    A single string is rejected, because it would be read as a list of characters.

    Args:
        texts: the argument.
        name: the name of the argument, for the message.
        other: another type that the items may have.

    Raises:
        UserError: the argument is not a list, or an item is not a text.
    """
    items = texts if isinstance(texts, Collection) and not isinstance(texts, str) else [None]
    if not all(isinstance(item, str | other) for item in items):
        shown = repr(texts)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
        raise UserError(f"{name} must be a list of texts, got {shown}")


class TextModel:
    """A model with its tokenizer. A subclass declares the supported heads and adds its task.

    Args:
        model: the model.
        params: its parameters.
        tokenizer: its tokenizer.

    Raises:
        UserError: the model's head is not in `heads`.
    """

    heads: ClassVar[Container[str | None]]
    """The supported heads."""
    refusal: ClassVar[str]
    """The part of the error message that says what a model with an unsupported head cannot do, such
    as "cannot fill masks"."""
    remedy: ClassVar[str]
    """The part of the error message that says, as an imperative, what to do if the head is not
    supported."""
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
    def loaded(self) -> Loaded:
        """The model and its parameters."""
        return self._model, self._params

    @property
    def max_length(self) -> int:
        """The maximum number of tokens that the model reads."""
        return self._model.config.max_length

    @classmethod
    def of_run(
        cls: type[Opened],
        folder: str | Path,
        *,
        step: int | None = None,
        log: LogFn = ignore,
        max_length: int | None = None,
        loaded: Loaded | None = None,
        ema: bool = False,
    ) -> Opened:
        """Opens the model of a run folder.

        Args:
            folder: a run folder, a folder in the Hugging Face format, or a name on the hub.
            step: the checkpoint. Defaults to the newest checkpoint.
            log: called with a line if the tokenizer may belong to another model.
            max_length: overrides the model's maximum input length, in tokens. Only models without a
              position table support a different length.
            loaded: the model in the folder and its parameters, if they have been loaded before. If
              None, the folder is loaded.
            ema: whether to use the moving average of the parameters. A run has this average if
              `optimizer.ema_decay` is set.

        Raises:
            FileNotFoundError: `folder` is not a run folder, or has no such checkpoint.
            UserError: the model has an unsupported head, a parameter is NaN or infinite, its stored
              settings are not supported, or `max_length` differs from its position table.
        """
        # Check the head before loading the parameters, to fail fast.
        config, tokenizer = open_folder(folder)
        remedy = f"{cls.remedy}, or use the command {_command(config)}"
        require_head(config, cls.heads, cls.refusal, remedy)
        note = vocabulary_note(folder, config, tokenizer)
        if note is not None:
            log(note)
        model, params = loaded or load_finite(folder, step=step, max_length=max_length, ema=ema)
        opened = cls._open(model, params, tokenizer, folder)
        if config.head == "seq2seq_lm":
            opened._stored_start = target_start(folder, tokenizer)
        return opened

    @classmethod
    def _open(
        cls: type[Opened], model: Model, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> Opened:
        """Constructs the object. A subclass may override this method to read additional files."""
        del folder
        return cls(model, params, tokenizer)


def _command(config: TransformerConfig) -> str:
    """Returns the command that runs models with this head."""
    return COMMANDS.get(HEADS[config.head].hub_task, "predict")
