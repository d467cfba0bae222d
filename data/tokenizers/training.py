"""Trains vocabularies deterministically: the same texts result in the same bytes on disk."""

import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..common.errors import DataError
from ..common.fields import Checked, PositiveInt, require
from .base import END_OF_TEXT, SpecialIds, Tokenizer
from .load import load_tokenizer

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer

TokenizerKind = Literal[
    "byte-bpe", "wordpiece", "sentencepiece-unigram", "sentencepiece-bpe", "characters", "words"
]

# The number of threads is fixed, because the result depends on it and must be the same on all
# machines.
_NUM_THREADS = 4
# A WordPiece vocabulary has at most this many characters; rarer characters are encoded as [UNK].
_MAX_ALPHABET = 1000
# The maximum length of a line in characters. Longer lines are split, because sentencepiece would
# silently drop them.
_MAX_LINE = 1 << 16


@dataclass(frozen=True)
class TokenizerConfig(Checked):
    """The tokenizer of a run, which either exists or is trained on the corpus."""

    kind: TokenizerKind = "byte-bpe"
    """The kind of vocabulary to train: byte-level BPE (GPT-2), WordPiece (BERT), sentencepiece,
    characters, or whole words."""

    vocab_size: PositiveInt | None = None
    """The number of tokens, including special tokens. It is required for all kinds except
    characters and words (where the default is to include all words of the text)."""

    lowercase: bool = True
    """Whether the kinds wordpiece and words convert text to lower case and remove accents. Other
    kinds never change text.
    """

    path: str | None = None
    """An existing tokenizer (file or folder) to use instead of training a tokenizer."""


def train_tokenizer(
    texts: Iterable[str], config: TokenizerConfig, *, reserved: int = 0
) -> Tokenizer:
    """Trains the vocabulary that a configuration describes, or loads the tokenizer that it names.

    Vocabularies of the kinds WordPiece and words have BERT's special tokens, beginning with
    ``[PAD]`` (0). They encode a word that is not in the vocabulary as ``[UNK]``. All other
    vocabularies have the special token ``<|endoftext|>`` (0), which begins and ends a document, and
    can encode any text.

    Args:
      texts: The documents of the training split, which are read once, or twice for WordPiece.
        Their order matters only for sentencepiece.
      config: The kind and the number of tokens.
      reserved: The number of these tokens that the caller adds to the vocabulary, such as
        sentinels.

    Returns:
      The tokenizer, without the reserved tokens.

    Raises:
      DataError: The number of tokens is missing, is given for characters, is smaller than the
        minimum for the kind, or is larger than the texts can fill; or ``texts`` contains no text or
        is a single string.
    """
    problem = "texts is one string: give a list of texts, or split it into documents"
    require(not isinstance(texts, str), problem, DataError)
    if config.path is not None:
        return load_tokenizer(config.path)
    # For characters a size is an error, for words it is optional, and for all other kinds it is
    # required.
    kind, size = config.kind, config.vocab_size
    require(
        kind != "characters" or size is None,
        f"data.tokenizer.vocab_size {size} was given for a characters tokenizer, whose "
        f"size is the number of characters in the text: leave it out",
        DataError,
    )
    require(
        kind in ("characters", "words") or size is not None,
        f"a {kind} tokenizer needs a vocabulary size: set data.tokenizer.vocab_size, for "
        "example 4096",
        DataError,
    )
    corpus = _Corpus(texts, kind, size or 0, reserved)
    tokenizer = _TRAINERS[kind](corpus, config.lowercase)
    corpus.check_filled(tokenizer.vocab_size)
    return tokenizer


class _Corpus:
    """The texts that train a vocabulary, and the size that the vocabulary should have.

    Attributes:
      kind: The kind of the vocabulary.
      size: The number of tokens to train. If 0, any number is allowed.
      has_text: Whether any of the texts read so far contains more than white space.
    """

    def __init__(self, texts: Iterable[str], kind: str, size: int, reserved: int) -> None:
        self._texts, self._wanted, self._reserved = texts, size, reserved
        self.kind, self.size = kind, max(size - reserved, 0)
        self.has_text = False

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.has_text = self.has_text or bool(text.strip())
            yield text

    def check_minimum(self, least: int) -> None:
        """Checks that the size leaves room for all bytes, characters and special tokens.

        Raises:
          DataError: The size is below ``least``.
        """
        least += self._reserved
        require(
            not 0 < self._wanted < least,
            f"a {self.kind} vocabulary of {self._wanted} tokens is too small for its bytes, "
            "characters and special tokens: set data.tokenizer.vocab_size to at least "
            f"{least}",
            DataError,
        )

    def check_filled(self, possible: float = math.inf) -> None:
        """Checks that the texts fill the vocabulary. Call this method after reading the texts.

        Raises:
          DataError: The texts are empty, or the size is above ``possible``.
        """
        problem = "a tokenizer cannot be trained: the source has no text; give a source with text"
        require(self.has_text, problem, DataError)
        possible += self._reserved
        require(
            self._wanted <= possible,
            f"the corpus is too small for a vocabulary of {self._wanted} tokens: it fills "
            f"{possible}; set data.tokenizer.vocab_size to at most {possible}, or give more "
            "text",
            DataError,
        )


def _train_characters(corpus: _Corpus, lowercase: bool) -> Tokenizer:
    from .characters import CharacterTokenizer

    del lowercase
    return CharacterTokenizer.train(corpus)


def _train_byte_bpe(corpus: _Corpus, lowercase: bool) -> Tokenizer:
    from tokenizers import models, pre_tokenizers, trainers

    from .huggingface import HuggingFaceTokenizer, byte_level_backend

    del lowercase
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus.check_minimum(len(alphabet) + 1)
    backend = byte_level_backend(models.BPE())
    # Every byte gets a piece, so that the vocabulary can encode any text.
    trainer = trainers.BpeTrainer(
        vocab_size=corpus.size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return HuggingFaceTokenizer(backend, SpecialIds(bos=0, eos=0))


def _train_wordpiece(corpus: _Corpus, lowercase: bool) -> Tokenizer:
    """Trains BPE merges and keeps only the pieces, as the library's WordPiece trainer does.

    The library's trainer adds the ``##`` pieces in the order of a hash table, and if merges are
    equally frequent, the result depends on this order. To make the result deterministic, this
    function gives all ``##`` pieces to the library at the start, in a fixed order.
    """
    from tokenizers import models, trainers

    from .huggingface import WORDPIECE_SPECIALS, wordpiece, wordpiece_backend

    # The texts are read twice: first for the alphabet, then for the merges.
    texts = list(corpus)
    backend = wordpiece_backend(models.WordPiece(unk_token="[UNK]"), lowercase)
    alphabet = _alphabet(backend.normalizer, texts)
    # Each character is two pieces: one at the start of a word, and one inside a word.
    given = [*WORDPIECE_SPECIALS, *alphabet, *(f"##{character}" for character in alphabet)]
    corpus.check_minimum(len(given))
    trainer = trainers.WordPieceTrainer(
        vocab_size=corpus.size,
        special_tokens=given,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    ids = backend.get_vocab()
    return wordpiece(sorted(ids, key=ids.__getitem__), lowercase)


def _train_words(corpus: _Corpus, lowercase: bool) -> Tokenizer:
    """Selects the most frequent words; if words are equally frequent, in alphabetical order."""
    from .huggingface import WORDPIECE_SPECIALS, wordpiece

    corpus.check_minimum(len(WORDPIECE_SPECIALS) + 1)
    # A vocabulary without words splits a text in the same way as the final vocabulary.
    backend = wordpiece(list(WORDPIECE_SPECIALS), lowercase, whole_words=True).backend()
    counts: Counter[str] = Counter()
    for text in corpus:
        normal = backend.normalizer.normalize_str(text)
        counts.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    pieces = [*WORDPIECE_SPECIALS, *frequent]
    return wordpiece(pieces[: corpus.size or None], lowercase, whole_words=True)


def _alphabet(normalizer: "Normalizer", texts: Iterable[str]) -> list[str]:
    """Returns the most frequent characters of normalized texts, sorted by code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    frequent = sorted(itertools.filterfalse(str.isspace, counts), key=lambda c: (-counts[c], c))
    return sorted(frequent[:_MAX_ALPHABET])


def _train_sentencepiece(corpus: _Corpus, lowercase: bool) -> Tokenizer:
    import sentencepiece

    from .sentencepiece import SentencePieceTokenizer

    del lowercase
    model = io.BytesIO()
    try:
        # Keep text unchanged: do not normalize it, add no prefix, and keep all spaces. Unknown
        # characters are encoded as bytes.
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(corpus),
            model_writer=model,
            model_type=corpus.kind.removeprefix("sentencepiece-"),
            vocab_size=corpus.size,
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
        message = str(error)
        # Two of the library's error messages state the largest or the smallest possible size.
        for pattern, check in _BOUNDS.items():
            for bound in re.findall(pattern, message):
                check(corpus, int(bound))
        corpus.check_filled()
        reason = message.splitlines()[0]
        raise DataError(f"sentencepiece cannot train {corpus.size} tokens: {reason}") from None
    return SentencePieceTokenizer(model.getvalue())


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Splits texts at line feeds, which are separate pieces, and splits long lines at any point."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _MAX_LINE):
                yield line[start : start + _MAX_LINE]


_TRAINERS: dict[str, Callable[[_Corpus, bool], Tokenizer]] = {
    "byte-bpe": _train_byte_bpe,
    "wordpiece": _train_wordpiece,
    "sentencepiece-unigram": _train_sentencepiece,
    "sentencepiece-bpe": _train_sentencepiece,
    "characters": _train_characters,
    "words": _train_words,
}
# For each pattern of a sentencepiece error that states a limit of the size: the check to call.
_BOUNDS = {
    r"value <= (\d+)": _Corpus.check_filled,
    r"required_chars\. \d+ vs (\d+)": _Corpus.check_minimum,
}
