"""The tokenizer properties that models use: size, special tokens, and files for transformers."""

from os import PathLike
from typing import Literal, Protocol, runtime_checkable


@runtime_checkable
class SpecialTokens(Protocol):
    """The ids of a vocabulary's special tokens, or None for a missing token."""

    @property
    def pad(self) -> int | None:
        """The padding token."""
        ...

    @property
    def unk(self) -> int | None:
        """The token for characters outside the vocabulary."""
        ...

    @property
    def bos(self) -> int | None:
        """The token that starts a text."""
        ...

    @property
    def eos(self) -> int | None:
        """The token that ends a text."""
        ...

    @property
    def cls(self) -> int | None:
        """The token whose output represents the whole sequence."""
        ...

    @property
    def sep(self) -> int | None:
        """The token that ends each text of a pair."""
        ...

    @property
    def mask(self) -> int | None:
        """The token that replaces masked tokens."""
        ...


@runtime_checkable
class Vocabulary(Protocol):
    """A tokenizer of flaxzoo, as `data.load_tokenizer` and `data.train_tokenizer` return it."""

    kind: str
    vocab_size: int

    @property
    def special_ids(self) -> SpecialTokens:
        """The ids of the special tokens."""
        ...

    @property
    def target(self) -> "Vocabulary":
        """The tokenizer of a translation model's targets, or `self` if the sources share it."""
        ...

    def export(
        self,
        folder: str | PathLike[str],
        *,
        closing: bool = False,
        padding_side: Literal["left", "right"] | None = None,
        max_length: int | None = None,
    ) -> str:
        """Writes transformers' tokenizer files; returns a note on how the libraries differ."""
        ...
