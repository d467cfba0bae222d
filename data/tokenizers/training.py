"""Deterministic training of vocabularies: the same texts give the same bytes on disk."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..common.errors import DataError
from ..common.fields import Checked, PositiveInt
from .base import END_OF_TEXT, SpecialIds, Tokenizer
from .load import load_tokenizer

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer

TokenizerKind = Literal[
    "byte-bpe", "wordpiece", "sentencepiece-unigram", "sentencepiece-bpe", "characters", "words"
]

# The result depends on the number of threads, so it must not depend on the machine.
_NUM_THREADS = 4
# A WordPiece vocabulary has at most this many characters; rarer ones become [UNK].
_MAX_ALPHABET = 1000
# Sentencepiece silently drops longer lines, so lines are split into this many characters.
_MAX_LINE = 1 << 16


@dataclass(frozen=True)
class TokenizerConfig(Checked):
    """Which tokenizer to use: an existing one, or one trained on the corpus."""

    kind: TokenizerKind = "byte-bpe"
    """Kind to train: byte-level BPE (GPT-2), WordPiece (BERT), sentencepiece, characters, or whole
    words."""

    vocab_size: PositiveInt | None = None
    """Number of tokens, including special tokens. Required except for characters and words (by
    default all words of the text)."""

    lowercase: bool = True
    """Whether wordpiece and words lowercase text and remove accents. Other kinds never do."""

    path: str | None = None
    """An existing tokenizer (file or folder) to use instead of training one."""


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """Trains the vocabulary that a config describes, or loads the one that it names.

    WordPiece and words have BERT's special tokens, ``[PAD]`` with id 0; a word that is not in the
    vocabulary is ``[UNK]``. Every other vocabulary has ``<|endoftext|>`` with id 0, which begins
    and ends a document, and can encode any text.

    Args:
      texts: The documents of the training split, which are read once, or twice for WordPiece.
        Their order matters only for sentencepiece.
      config: The kind and the number of tokens.

    Returns:
      The tokenizer.

    Raises:
      DataError: The number of tokens is missing, given for characters, smaller than the
        minimum of the kind, or larger than the texts can fill; or ``texts`` has no text, or is a
        single string.
    """
    if isinstance(texts, str):
        raise DataError("texts is one string: give a list of texts, or split it into documents")
    if config.path is not None:
        return load_tokenizer(config.path)
    if config.kind == "characters":
        return _train_characters(texts, config)
    size = config.vocab_size
    if config.kind == "words":
        return _train_words(texts, size, config.lowercase)
    if size is None:
        raise DataError(
            f"a {config.kind} tokenizer needs a vocabulary size: set data.tokenizer.vocab_size, "
            "for example 4096"
        )
    if config.kind == "byte-bpe":
        return _train_byte_bpe(texts, size)
    if config.kind == "wordpiece":
        return _train_wordpiece(texts, size, config.lowercase)
    return _train_sentencepiece(texts, config.kind, size)


def _train_characters(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    from .characters import CharacterTokenizer

    if config.vocab_size is not None:
        raise DataError(
            f"data.tokenizer.vocab_size {config.vocab_size} was given for a characters tokenizer, "
            "whose size is the number of characters in the text: leave it out, or give None"
        )
    tokenizer = CharacterTokenizer.train(texts)
    if tokenizer.vocab_size == CharacterTokenizer("").vocab_size:
        raise _no_text()
    return tokenizer


def _train_byte_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    from tokenizers import models, pre_tokenizers, trainers

    from .huggingface import HuggingFaceTokenizer, byte_level_backend

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size < len(alphabet) + 1:
        raise _too_small(size, len(alphabet) + 1, "byte-bpe")
    # Texts are read once, so count characters on the way to notice empty input.
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
    if backend.get_vocab_size() < size:
        raise _too_large(size, backend.get_vocab_size())
    return HuggingFaceTokenizer(backend, SpecialIds(bos=0, eos=0))


def _train_wordpiece(texts: Iterable[str], size: int, lowercase: bool) -> Tokenizer:
    """Trains BPE merges and keeps only the pieces, like the library's own WordPiece trainer.

    The library adds the ``##`` pieces in the order of a hash table, and that order decides between
    equally frequent merges. Here all ``##`` pieces are given at the start, in a fixed order.
    """
    from tokenizers import models, trainers

    from .huggingface import WORDPIECE_SPECIALS, wordpiece, wordpiece_backend

    # The texts are read twice: for the alphabet, then for the merges.
    texts = texts if isinstance(texts, Sequence) else list(texts)
    backend = wordpiece_backend(models.WordPiece(unk_token="[UNK]"), lowercase)
    alphabet = _alphabet(backend.normalizer, texts)
    if not alphabet:
        raise _no_text()
    given = [*WORDPIECE_SPECIALS, *alphabet, *(f"##{character}" for character in alphabet)]
    if size < len(given):
        raise _too_small(size, len(given), "wordpiece")
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=given,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() < size:
        raise _too_large(size, backend.get_vocab_size())
    ids = backend.get_vocab()
    return wordpiece(sorted(ids, key=ids.__getitem__), lowercase)


def _train_words(texts: Iterable[str], size: int | None, lowercase: bool) -> Tokenizer:
    """Takes the most frequent words of the texts; equally frequent words in alphabetical order."""
    from .huggingface import WORDPIECE_SPECIALS, words

    # A vocabulary without words splits a text in the same way as the final vocabulary will.
    backend = words(list(WORDPIECE_SPECIALS), lowercase).backend()
    counts: Counter[str] = Counter()
    for text in texts:
        normal = backend.normalizer.normalize_str(text)
        counts.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal))
    if not counts:
        raise _no_text()
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    possible = len(WORDPIECE_SPECIALS) + len(frequent)
    if size is not None and size <= len(WORDPIECE_SPECIALS):
        raise _too_small(size, len(WORDPIECE_SPECIALS) + 1, "words")
    if size is not None and size > possible:
        raise _too_large(size, possible)
    return words([*WORDPIECE_SPECIALS, *frequent][:size], lowercase)


def _alphabet(normalizer: "Normalizer", texts: Iterable[str]) -> list[str]:
    """Returns the most frequent characters of normalized texts, sorted by code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    frequent = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    return sorted(frequent[:_MAX_ALPHABET])


def _train_sentencepiece(texts: Iterable[str], kind: TokenizerKind, size: int) -> Tokenizer:
    import sentencepiece

    from .sentencepiece import SentencePieceTokenizer

    counted = _Counted(texts)
    model = io.BytesIO()
    try:
        # Keep text unchanged: no normalization, no prefix, all spaces. Unknown characters become
        # bytes.
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
    """Texts whose characters are counted while a library reads them."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters += len(text)
            yield text


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Splits texts at line feeds, which are separate pieces, and long lines anywhere."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _MAX_LINE):
                yield line[start : start + _MAX_LINE]


def _explain(message: str, size: int, kind: str) -> DataError:
    """Converts the library's errors to DataError; two of them state the size that would work."""
    if found := re.search(r"value <= (\d+)", message):
        return _too_large(size, int(found[1]))
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return _too_small(size, int(found[1]), kind)
    return DataError(f"sentencepiece cannot train {size} tokens: {message.splitlines()[0]}")


def _too_small(requested: int, minimum: int, kind: str) -> DataError:
    return DataError(
        f"a {kind} vocabulary of {requested} tokens is too small for its bytes, characters and "
        f"special tokens: set data.tokenizer.vocab_size to at least {minimum}"
    )


def _too_large(requested: int, possible: int) -> DataError:
    return DataError(
        f"the corpus is too small for a vocabulary of {requested} tokens: it fills {possible}; "
        f"set data.tokenizer.vocab_size to at most {possible}, or give more text"
    )


def _no_text() -> DataError:
    return DataError("there is no text to train a tokenizer on: give a source with text")
