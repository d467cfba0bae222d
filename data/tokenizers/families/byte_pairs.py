"""Creates tokenizers with WordPiece or byte-pair encoding: BERT, GPT-2, GPT, Llama and Gemma."""

from collections.abc import Callable

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from ...common.errors import DataError
from ...common.fields import require
from ..base import SPACE
from ..folder import Settings
from ..sentencepiece_model import when
from .vocabulary import Vocabulary, make_tokenizer

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pairs(vocabulary: Vocabulary, **options: str | bool) -> models.BPE:
    return models.BPE(dict(vocabulary.ids), list(vocabulary.merges), **options)


# BERT: WordPiece.


def bert(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates BERT's tokenizer, which uses WordPiece."""
    unknown = settings.named("unk_token")
    require(
        unknown in vocabulary.ids,
        f"{settings.file}: unk_token {unknown!r} is not in the vocabulary: name one of its pieces",
        DataError,
    )
    normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        # If None, the library strips accents if it converts text to lower case.
        strip_accents=settings.get("strip_accents", bool),
        lowercase=settings.flag("do_lower_case", True),
    )
    model = models.WordPiece(dict(vocabulary.ids), unk_token=unknown)
    splitting = pre_tokenizers.BertPreTokenizer()
    return make_tokenizer(model, normalizer, splitting, decoders.WordPiece(prefix="##"))


# BPE over bytes (GPT-2) and over characters (GPT).


def byte_level(
    normalizer: normalizers.Normalizer | None = None, words: str | None = None
) -> Callable[[Vocabulary, Settings], tokenizers.Tokenizer]:
    """Returns a function that creates a byte-level tokenizer.

    Args:
      normalizer: The normalizer, or None to leave text unchanged.
      words: The pattern that splits text into words. Defaults to the pattern of GPT-2.
    """

    def backend(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
        prefix = settings.flag("add_prefix_space", False)
        alphabet = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=words is None)
        splitting: pre_tokenizers.PreTokenizer = alphabet
        if words is not None:
            first = pre_tokenizers.Split(Regex(words), "isolated")
            splitting = pre_tokenizers.Sequence([first, alphabet])
        return make_tokenizer(_pairs(vocabulary), normalizer, splitting, decoders.ByteLevel())

    return backend


def openai_gpt(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates GPT's tokenizer, which uses BPE over lowercase characters."""
    unknown = settings.named("unk_token")
    model = _pairs(vocabulary, unk_token=unknown, end_of_word_suffix="</w>")
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitting = pre_tokenizers.BertPreTokenizer()
    return make_tokenizer(model, normalizer, splitting, decoders.BPEDecoder(suffix="</w>"))


# BPE over characters, with bytes for characters that are not pieces (Llama and Gemma).

_FALLS_BACK = {"fuse_unk": True, "byte_fallback": True}
_SPACES_AND_BYTES = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def llama(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates Llama's tokenizer, which encodes characters that are not pieces as bytes."""
    prefix = settings.flag("add_prefix_space", True)
    # Legacy tokenizers put a space before each part of a text between added tokens, not only before
    # the first part.
    scheme = "always" if settings.flag("legacy", False) else "first"
    splitting = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme if prefix else "never", split=False
    )
    strip = when(prefix, decoders.Strip(content=" ", left=1))
    decoder = decoders.Sequence([*_SPACES_AND_BYTES, *strip])
    return make_tokenizer(_pairs(vocabulary, **_FALLS_BACK), None, splitting, decoder)


def gemma(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates Gemma's tokenizer, which encodes characters that are not pieces as bytes."""
    model = _pairs(vocabulary, unk_token=settings.named("unk_token"), **_FALLS_BACK)
    normalizer = normalizers.Replace(" ", SPACE)
    # This step has no effect, because the normalizer replaces all spaces. It is the same as in
    # transformers.
    splitting = pre_tokenizers.Split(" ", "merged_with_previous")
    return make_tokenizer(model, normalizer, splitting, decoders.Sequence(_SPACES_AND_BYTES))
