"""The tokenizers of the model families, as transformers 5 makes them from their vocabularies.

One record per class of transformers (``models/*/tokenization_*.py``): its special tokens, its
normalizer, its pre-tokenizer, its decoder and its template. Such a class reads only the vocabulary
from a ``tokenizer.json``, and applies its settings there as well.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ..common.errors import DataError, suggest
from .folder import Settings, Token, name_of

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character that represents a space in pieces."""

_END = "<|endoftext|>"
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LANGUAGES_25 = tuple(
    """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV
    my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN
    """.split()
)
LANGUAGES_50 = LANGUAGES_25 + tuple(
    """
    af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX
    sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
    """.split()
)

Scores = Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary, read from any of the supported files.

    Attributes:
      ids: The id of each piece.
      merges: The merges of BPE in rank order.
      scores: The pieces of a unigram model in the order of their ids, with scores.
      charsmap: The normalization of a sentencepiece model; None if it does not change text.
      controls: The control and user-defined pieces of a sentencepiece file; None for other files.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    merges: Sequence[tuple[str, str]] = ()
    scores: Scores = ()
    charsmap: bytes | None = None
    controls: Sequence[AddedToken] | None = None


def _as_stated(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    del settings
    return vocabulary


def _controls(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    stated = settings.tokens("additional_special_tokens")
    return list((stated if vocabulary.controls is None else vocabulary.controls) or [])


@dataclass(frozen=True, kw_only=True)
class Family:
    """A class of tokenizers."""

    classes: tuple[str, ...]
    """Its names in transformers, without ``Fast``."""
    model_types: tuple[str, ...] = ()
    """The model types that use this class unless their files state another."""
    model: Literal["BPE", "Unigram", "WordPiece"]
    """The kind of vocabulary."""
    files: tuple[str, ...]
    """The files of a vocabulary without ``tokenizer.json``."""
    tokens: Mapping[str, Token | None]
    """The special tokens of roles that the files do not state."""
    backend: Callable[[Vocabulary, Settings], tokenizers.Tokenizer]
    """Makes the tokenizer without its added tokens and its template."""
    rearranged: Callable[[Vocabulary, Settings], Vocabulary] = _as_stated
    """Renumbers the pieces of a sentencepiece file as the family does."""
    extra: Callable[[Vocabulary, Settings], list[Token]] = _controls
    """Returns the special tokens without a role, if no ``extra_special_tokens`` are stated."""
    template: Callable[[tokenizers.Tokenizer, Settings], processors.PostProcessor] | None = None
    """Makes the template. If None, it is in ``tokenizer.json`` or adds begin and end on request."""
    plain_specials: bool = False
    """Whether special tokens lose the other properties that the files give them."""
    every_byte: bool = True
    """Whether each byte must have a piece in ``vocab.json``."""


def plain_template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
    """Makes the template that ``add_bos_token`` and ``add_eos_token`` request."""
    front = _edge(settings, "bos_token", "add_bos_token")
    back = _edge(settings, "eos_token", "add_eos_token")
    names = [*front, *back]
    return processors.TemplateProcessing(
        single=[*(f"{n}:0" for n in front), "$A:0", *(f"{n}:0" for n in back)],
        pair=[
            *(f"{n}:0" for n in front),
            "$A:0",
            *(f"{n}:0" for n in back),
            *(f"{n}:1" for n in front),
            "$B:1",
            *(f"{n}:1" for n in back),
        ],
        special_tokens=[(name, _id(backend, name)) for name in dict.fromkeys(names)],
    )


def _edge(settings: Settings, role: str, request: str) -> tuple[str, ...]:
    wanted = settings.flag(request, False) and settings.token(role) is not None
    return (settings.named(role),) if wanted else ()


def _id(backend: tokenizers.Tokenizer, name: str) -> int:
    id = backend.token_to_id(name)
    assert id is not None, name  # all special tokens were added before
    return id


def _template(
    backend: tokenizers.Tokenizer, single: list[str], pair: list[str]
) -> processors.PostProcessor:
    names = dict.fromkeys(n.rsplit(":", 1)[0] for n in pair if not n.startswith(("$A", "$B")))
    return processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(name, _id(backend, name)) for name in names]
    )


# BERT: WordPiece.


def _bert(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    unknown = settings.named("unk_token")
    if unknown not in vocabulary.ids:
        raise DataError(
            f"{settings.file}: unk_token {unknown!r} is not in the vocabulary: name one of its "
            "pieces"
        )
    backend = tokenizers.Tokenizer(models.WordPiece(dict(vocabulary.ids), unk_token=unknown))
    # If `strip_accents` is None, the library strips accents whenever it lowercases.
    accents = "strip_accents"
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        strip_accents=None
        if settings.values.get(accents) is None
        else settings.flag(accents, False),
        lowercase=settings.flag("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _bert_template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
    begin, end = settings.named("cls_token"), settings.named("sep_token")
    single = [f"{begin}:0", "$A:0", f"{end}:0"]
    return _template(backend, single, [*single, "$B:1", f"{end}:1"])


# GPT-2 and the families with its alphabet of bytes.


def _byte_pairs(
    vocabulary: Vocabulary, splitting: pre_tokenizers.PreTokenizer
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(dict(vocabulary.ids), list(vocabulary.merges)))
    backend.pre_tokenizer = splitting
    backend.decoder = decoders.ByteLevel()
    return backend


def _gpt2(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    prefix = settings.flag("add_prefix_space", False)
    return _byte_pairs(vocabulary, pre_tokenizers.ByteLevel(add_prefix_space=prefix))


def _roberta_template(
    backend: tokenizers.Tokenizer, settings: Settings
) -> processors.PostProcessor:
    begin, end = settings.named("cls_token"), settings.named("sep_token")
    return processors.RobertaProcessing(
        (end, _id(backend, end)),
        (begin, _id(backend, begin)),
        settings.flag("trim_offsets", True),
        settings.flag("add_prefix_space", False),
    )


def _gpt_neox(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    backend = _gpt2(vocabulary, settings)
    backend.normalizer = normalizers.NFC()
    return backend


def _qwen2(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    prefix = settings.flag("add_prefix_space", False)
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated")
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    backend = _byte_pairs(vocabulary, pre_tokenizers.Sequence([words, alphabet]))
    backend.normalizer = normalizers.NFC()
    return backend


def _openai_gpt(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    model = models.BPE(
        dict(vocabulary.ids),
        list(vocabulary.merges),
        unk_token=settings.named("unk_token"),
        end_of_word_suffix="</w>",
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return backend


# Llama and Gemma: BPE over characters, with bytes for those that no piece has.


def _fallback_pairs(vocabulary: Vocabulary, unknown: str | None) -> tokenizers.Tokenizer:
    model = models.BPE(
        dict(vocabulary.ids),
        list(vocabulary.merges),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    return tokenizers.Tokenizer(model)


def _llama(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    backend = _fallback_pairs(vocabulary, None)
    prefix = settings.flag("add_prefix_space", True)
    # Legacy: a space before each part between added tokens, not only before the first.
    scheme = "always" if settings.flag("legacy", False) else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme if prefix else "never", split=False
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence([*steps, *strip])
    return backend


def _gemma(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    backend = _fallback_pairs(vocabulary, settings.named("unk_token"))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    # The normalizer leaves no space to split at; transformers has this step as well.
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


# T5, Pegasus and mBART: unigram models.


def _unigrams(
    vocabulary: Vocabulary, unknown: int, rules: list[normalizers.Normalizer]
) -> tokenizers.Tokenizer:
    """Makes a unigram tokenizer that puts a space before each text."""
    backend = tokenizers.Tokenizer(models.Unigram(list(vocabulary.scores), unknown))
    if rules:
        backend.normalizer = normalizers.Sequence(rules)
    words = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    backend.pre_tokenizer = words
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    return backend


def _split_at_whitespace(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    words = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    return backend


def _charsmap(vocabulary: Vocabulary) -> list[normalizers.Normalizer]:
    found = vocabulary.charsmap
    return [normalizers.Precompiled(found)] if found else []


def _one_space() -> normalizers.Normalizer:
    return normalizers.Replace(Regex(" {2,}"), " ")


def _t5(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    del settings
    return _split_at_whitespace(_unigrams(vocabulary, 2, _charsmap(vocabulary)))


def _sentinels(settings: Settings) -> list[str]:
    return [f"<extra_id_{number}>" for number in range(settings.number("extra_ids", 100))]


def _with_sentinels(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    # <extra_id_0> has the last id.
    last = [(name, 0.0) for name in reversed(_sentinels(settings))]
    return dataclasses.replace(vocabulary, scores=[*vocabulary.scores, *last])


def _t5_extra(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    stated, sentinels = _controls(vocabulary, settings), _sentinels(settings)
    # The files may list sentinels as well; then their number must agree.
    known = [token for token in stated if "<extra_id_" in name_of(token)]
    if known and sentinels and len(known) != len(sentinels):
        raise DataError(
            f"{settings.file}: extra_ids {len(sentinels)} is not the number of <extra_id_…> in "
            f"additional_special_tokens, {len(known)}: correct one of them"
        )
    return stated if known else [*stated, *sentinels]


def _t5_template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
    end = settings.named("eos_token")
    return _template(backend, ["$A", end], ["$A", end, "$B", end])


def _pegasus(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    name = settings.named("unk_token")
    # The id depends on the number of reserved tokens before it.
    ids = [id for id, piece in enumerate(vocabulary.scores) if piece == (name, 0.0)]
    if not ids:
        raise DataError(f"{settings.file.parent}: the vocabulary has no {name}: fetch it again")
    unknown = ids[0]
    rules = _charsmap(vocabulary) or [normalizers.Replace(Regex(r"\n"), " ")]
    return _unigrams(vocabulary, unknown, [*rules, _one_space()])


def _with_masks(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    stated = settings.stated  # these defaults differ from the record's, as in transformers
    names = [stated.get("mask_token", "<mask_1>"), stated.get("mask_token_sent", "<mask_2>")]
    masks = [str(getattr(name, "content", name)) for name in names if name is not None]
    # The reserved tokens come first: padding, end, masks and unused ones.
    ends = [settings.named("pad_token"), settings.named("eos_token")]
    first = [(name, 0.0) for name in [*ends, *dict.fromkeys(masks)]]
    unused = [(f"<unk_{n}>", -100.0) for n in range(2, settings.number("offset", 103))]
    return dataclasses.replace(vocabulary, scores=[*first, *unused, *vocabulary.scores[2:]])


def _pegasus_extra(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    mask = settings.values.get("mask_token_sent", "<mask_1>")
    stated = list(map(name_of, _controls(vocabulary, settings)))
    of_sentences = [] if mask is None or mask in stated else [str(getattr(mask, "content", mask))]
    return [*of_sentences, *(f"<unk_{n}>" for n in range(2, settings.number("offset", 103)))]


def _pegasus_template(
    backend: tokenizers.Tokenizer, settings: Settings
) -> processors.PostProcessor:
    end = settings.named("eos_token")
    return _template(backend, ["$A", end], ["$A", "$B", end])


def _mbart(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    del settings  # transformers does not normalize the text of mBART
    return _split_at_whitespace(_unigrams(vocabulary, 3, []))


def _mbart50(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    del settings
    return _unigrams(vocabulary, 3, [*_charsmap(vocabulary), _one_space()])


def _as_fairseq(
    languages: tuple[str, ...], first: str
) -> Callable[[Vocabulary, Settings], Vocabulary]:
    """Numbers pieces as fairseq: four tokens, pieces from the fourth, the languages, the mask."""

    def numbered(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
        roles = (first, "pad_token", "eos_token", "unk_token")
        start = [(settings.named(role), 0.0) for role in roles]
        end = [(name, 0.0) for name in (*languages, settings.named("mask_token"))]
        return dataclasses.replace(vocabulary, scores=[*start, *vocabulary.scores[3:], *end])

    return numbered


def _mbart_extra(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    return [*LANGUAGES_25, *_controls(vocabulary, settings)]


def _mbart50_extra(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    return [*_controls(vocabulary, settings), *LANGUAGES_50]


def _source_language(settings: Settings, languages: tuple[str, ...]) -> str:
    language = settings.text("src_lang", "en_XX")
    if language not in languages:
        raise DataError(
            f"{settings.file}: src_lang {language!r} is not a language of the model: "
            f"{suggest(language, list(languages))}"
        )
    return language


def _mbart_template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
    end = [settings.named("eos_token"), _source_language(settings, LANGUAGES_25)]
    return _template(backend, ["$A", *end], ["$A", "$B", *end])


def _mbart50_template(
    backend: tokenizers.Tokenizer, settings: Settings
) -> processors.PostProcessor:
    language, end = _source_language(settings, LANGUAGES_50), settings.named("eos_token")
    return _template(backend, [language, "$A", end], [language, "$A", "$B", end])


_BYTE_FILES = ("vocab.json", "merges.txt")
_ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_ROBERTA = {**_ENDS, "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>"}
_MASK = AddedToken("<mask>", lstrip=True)

BERT = Family(
    classes=("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"),
    model_types=("bert", "distilbert", "electra", "mobilebert"),
    model="WordPiece",
    files=("vocab.txt",),
    tokens={
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
    backend=_bert,
    template=_bert_template,
)
GPT2 = Family(
    classes=("GPT2Tokenizer",),
    model_types=("gpt2", "gpt_neo", "gptj", "opt"),
    model="BPE",
    files=_BYTE_FILES,
    tokens={"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None},
    backend=_gpt2,
)
T5 = Family(
    classes=("T5Tokenizer",),
    model_types=("t5", "mt5"),
    model="Unigram",
    files=("spiece.model",),
    tokens={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    backend=_t5,
    rearranged=_with_sentinels,
    extra=_t5_extra,
    template=_t5_template,
)
FAMILIES = (
    BERT,
    GPT2,
    T5,
    Family(
        classes=(
            *("RobertaTokenizer", "BartTokenizer", "LEDTokenizer", "LongformerTokenizer"),
            "MvpTokenizer",
        ),
        model_types=("roberta", "bart"),
        model="BPE",
        files=_BYTE_FILES,
        tokens={**_ROBERTA, "mask_token": "<mask>"},
        backend=_gpt2,
        template=_roberta_template,
    ),
    Family(
        classes=("GPTNeoXTokenizer",),
        model_types=("gpt_neox",),
        model="BPE",
        files=_BYTE_FILES,
        tokens={
            **{"unk_token": _END, "bos_token": _END, "eos_token": _END},
            "pad_token": "<|padding|>",
        },
        backend=_gpt_neox,
        template=plain_template,
    ),
    Family(
        classes=("Qwen2Tokenizer",),
        model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        model="BPE",
        files=_BYTE_FILES,
        tokens={"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END},
        backend=_qwen2,
        plain_specials=True,
    ),
    Family(
        classes=("OpenAIGPTTokenizer",),
        model_types=("openai-gpt",),
        model="BPE",
        files=_BYTE_FILES,
        tokens={"unk_token": "<unk>"},
        backend=_openai_gpt,
        every_byte=False,
    ),
    Family(
        classes=("LlamaTokenizer", "Phi3Tokenizer"),
        model="BPE",
        files=("tokenizer.model",),
        tokens=_ENDS,
        backend=_llama,
    ),
    Family(
        classes=("GemmaTokenizer",),
        model_types=("gemma", "gemma2", "gemma3", "gemma3_text"),
        model="BPE",
        files=("tokenizer.model",),
        tokens={
            **{"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"},
            **{"pad_token": "<pad>", "mask_token": "<mask>"},
        },
        backend=_gemma,
    ),
    Family(
        classes=("PegasusTokenizer",),
        model_types=("pegasus",),
        model="Unigram",
        files=("spiece.model",),
        tokens={
            **{"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
            "mask_token": "<mask_2>",
        },
        backend=_pegasus,
        rearranged=_with_masks,
        extra=_pegasus_extra,
        template=_pegasus_template,
    ),
    Family(
        classes=("MBartTokenizer",),
        model_types=("mbart",),
        model="Unigram",
        files=("sentencepiece.bpe.model",),
        tokens={**_ROBERTA, "mask_token": _MASK},
        backend=_mbart,
        rearranged=_as_fairseq(LANGUAGES_25, "bos_token"),
        extra=_mbart_extra,
        template=_mbart_template,
    ),
    Family(
        classes=("MBart50Tokenizer",),
        model="Unigram",
        files=("sentencepiece.bpe.model",),
        tokens={k: v for k, v in _ROBERTA.items() if k != "bos_token"} | {"mask_token": _MASK},
        backend=_mbart50,
        rearranged=_as_fairseq(LANGUAGES_50, "cls_token"),
        extra=_mbart50_extra,
        template=_mbart50_template,
    ),
)

# Models that use `tokenizer.json` or `tokenizer.model` unchanged, whatever class is stated.
_GENERIC_TYPES = ("mistral", "mixtral", "phi3")
FIXED_TYPES = ("qwen2",)
"""Models whose class replaces the stated class, unless there is an ``auto_map``."""


def family_of(
    model_type: str | None, class_name: str | None, *, is_byte_level: bool, keeps_class: bool
) -> Family | None:
    """Returns the family of a folder as ``AutoTokenizer`` chooses it.

    Args:
      model_type: The family of the model, or None if it is not stated.
      class_name: The class of the tokenizer, or None if it is not stated.
      is_byte_level: Whether the folder's ``tokenizer.json`` has an alphabet of bytes.
      keeps_class: Whether a stated class always applies.

    Returns:
      The family, or None to use ``tokenizer.json`` or ``tokenizer.model`` unchanged.
    """
    of_type = next((f for f in FAMILIES if model_type in f.model_types), None)
    of_class = next((f for f in FAMILIES if class_name in f.classes), None)
    if keeps_class and class_name is not None:
        return of_class
    if model_type in _GENERIC_TYPES or (is_byte_level and class_name == "LlamaTokenizer"):
        return None
    if class_name is None or model_type in FIXED_TYPES:
        return of_type
    return of_class
