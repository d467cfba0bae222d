"""Training a vocabulary. Deterministic: the same texts give the same bytes on disk."""

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .errors import DataError
from .tokenizer import END_OF_TEXT, SpecialIds, Tokenizer, load_tokenizer

TokenizerKind = Literal["byte-bpe", "sentencepiece-unigram", "sentencepiece-bpe", "characters"]

# The result depends on the number of threads, so it must not depend on the machine.
_NUM_THREADS = 4
# Sentencepiece silently leaves out longer lines; lines are cut to this many characters.
_MAX_LINE = 1 << 16


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer to use: an existing one, or one trained on the corpus."""

    kind: TokenizerKind = "byte-bpe"
    """The family to train: GPT-2's byte-level BPE, sentencepiece, or single characters."""

    vocab_size: int | None = None
    """Number of tokens, special ones included. Needed for all kinds but characters."""

    path: str | None = None
    """An existing tokenizer (file or folder) to use instead of training one."""


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """Trains the vocabulary that a config asks for, or loads the one it names.

    Every trained vocabulary has ``<|endoftext|>`` with id 0, which opens and closes a
    document, and can encode any text.

    Args:
        texts: The documents of the training split; read once. The order does not matter
            for characters and byte-level BPE.
        config: The family and the number of tokens.

    Returns:
        The tokenizer.

    Raises:
        DataError: The number of tokens is missing, given for characters, smaller than the
            family's minimum, or larger than the texts can fill; or there is no text.
    """
    if config.path is not None:
        return load_tokenizer(config.path)
    if config.kind == "characters":
        return _train_characters(texts, config)
    size = config.vocab_size
    if size is None:
        raise DataError(
            f"a {config.kind} tokenizer needs a vocabulary size: set vocab_size, for example 4096"
        )
    if config.kind == "byte-bpe":
        return _train_byte_bpe(texts, size)
    return _train_sentencepiece(texts, config.kind, size)


def _train_characters(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    from .characters import CharacterTokenizer

    if config.vocab_size is not None:
        raise DataError(
            f"vocab_size {config.vocab_size} was given for a characters tokenizer, whose size is "
            "the number of characters in the text: leave vocab_size out"
        )
    tokenizer = CharacterTokenizer.train(texts)
    if tokenizer.vocab_size == CharacterTokenizer("").vocab_size:
        raise _no_text()
    return tokenizer


def _train_byte_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    from tokenizers import models, pre_tokenizers, trainers

    from .huggingface_tokenizer import HuggingFaceTokenizer, byte_level_backend

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _check_minimum(size, len(alphabet) + 1, "byte-bpe")
    counted = _Counted(texts)
    backend = byte_level_backend(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(counted, trainer)
    if not counted.characters:
        raise _no_text()
    _check_filled(size, backend.get_vocab_size())
    return HuggingFaceTokenizer(backend, SpecialIds(bos=0, eos=0))


def _train_sentencepiece(texts: Iterable[str], kind: TokenizerKind, size: int) -> Tokenizer:
    import sentencepiece

    from .sentencepiece_tokenizer import SentencePieceTokenizer

    counted = _Counted(texts)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(counted),
            model_writer=model,
            model_type=kind.removeprefix("sentencepiece-"),
            vocab_size=size,
            num_threads=_NUM_THREADS,
            max_sentence_length=4 * _MAX_LINE,  # in bytes
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            user_defined_symbols=["\n"],
            bos_id=0,
            bos_piece=END_OF_TEXT,
            unk_id=1,
            eos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        if not counted.characters:
            raise _no_text() from None
        raise _explain(str(error), size, kind) from None
    return SentencePieceTokenizer(model.getvalue())


class _Counted:
    """Texts on their way into a library, with their characters counted."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters += len(text)
            yield text


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Cuts texts at line feeds, which are their own piece, and long lines anywhere."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _MAX_LINE):
                yield line[start : start + _MAX_LINE]


def _explain(message: str, size: int, kind: str) -> DataError:
    """Turns the library's two failures that depend on the size into ours."""
    if found := re.search(r"value <= (\d+)", message):
        return _too_large(size, int(found[1]))
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return _too_small(size, int(found[1]), kind)
    return DataError(f"sentencepiece cannot train {size} tokens: {message.splitlines()[0]}")


def _check_minimum(size: int, minimum: int, kind: str) -> None:
    if size < minimum:
        raise _too_small(size, minimum, kind)


def _check_filled(asked: int, possible: int) -> None:
    if possible < asked:
        raise _too_large(asked, possible)


def _too_small(asked: int, minimum: int, kind: str) -> DataError:
    return DataError(
        f"a {kind} vocabulary of {asked} tokens is too small for its bytes, characters and "
        f"special tokens: set vocab_size to at least {minimum}"
    )


def _too_large(asked: int, possible: int) -> DataError:
    return DataError(
        f"the corpus is too small for a vocabulary of {asked} tokens: it fills {possible}; "
        f"set vocab_size to at most {possible}, or give more text"
    )


def _no_text() -> DataError:
    return DataError("there is no text to train a tokenizer on: give a source with text")
