"""The tokenizers of the model families, as transformers 5 makes them from their vocabularies.

One record per class of transformers (``models/*/tokenization_*.py``): its special tokens, its
normalizer, its pre-tokenizer, its decoder and its template. Such a class reads only the vocabulary
from a ``tokenizer.json``, and applies its settings there as well.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

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

from ..common.errors import DataError
from .base import END_OF_TEXT, SPACE
from .folder import Folder, Settings, Token, name_of
from .sentencepiece_model import precompiled, when

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


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary, read from any of the supported files.

    Attributes:
      ids: The id of each piece.
      merges: The merges of BPE in rank order.
      scores: The pieces of a unigram model in the order of their ids, with scores.
      charsmap: The normalization of a sentencepiece model; None if it does not change text.
      controls: The control and user-defined pieces of a sentencepiece file; None for other files.
      unknown: The id of the unknown piece in a sentencepiece file; 1 for other files.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    merges: Sequence[tuple[str, str]] = ()
    scores: Sequence[tuple[str, float]] = ()
    charsmap: bytes | None = None
    controls: Sequence[AddedToken] | None = None
    unknown: int = 1


def _as_stated(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    del settings
    return vocabulary


def _controls(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    if vocabulary.controls is not None:
        return list(vocabulary.controls)
    return settings.tokens("additional_special_tokens")


Template: TypeAlias = Callable[[tokenizers.Tokenizer, Settings], processors.PostProcessor | None]
"""Makes the template of a tokenizer that has all of its special tokens."""


def _with_id(backend: tokenizers.Tokenizer, name: str) -> tuple[str, int]:
    id = backend.token_to_id(name)
    assert id is not None, name  # all special tokens were added before
    return name, id


def _layout(single: str, pair: str) -> Template:
    """Makes a template from layouts of one text and of two, such as ``cls_token:0 $A:0``.

    ``$A`` and ``$B`` are the texts; other words are settings that name special tokens. The number
    after a colon is the token type.
    """

    def template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
        parts = [part.partition(":") for part in pair.split()]
        names = {role: settings.named(role) for role, *_ in parts if not role.startswith("$")}

        def written(layout: str) -> list[str]:
            parts = (part.partition(":") for part in layout.split())
            return [names.get(role, role) + colon + type for role, colon, type in parts]

        ids = [_with_id(backend, name) for name in dict.fromkeys(names.values())]
        return processors.TemplateProcessing(
            single=written(single), pair=written(pair), special_tokens=ids
        )

    return template


def _stated_template(
    backend: tokenizers.Tokenizer, settings: Settings
) -> processors.PostProcessor | None:
    """Returns the template of ``tokenizer.json`` unless begin and end tokens are requested."""
    if {"add_bos_token", "add_eos_token"}.isdisjoint(settings.values):
        return backend.post_processor
    return _plain_template(backend, settings)


def _plain_template(
    backend: tokenizers.Tokenizer, settings: Settings
) -> processors.PostProcessor | None:
    """Makes the template that ``add_bos_token`` and ``add_eos_token`` request."""
    roles = [r for r in ("bos_token", "eos_token") if settings.flag(f"add_{r}", False)]
    present = [role for role in roles if settings.token(role) is not None]
    begin, end = ([role] * (role in present) for role in ("bos_token", "eos_token"))
    one, other = (
        " ".join(f"{part}:{type}" for part in (*begin, text, *end))
        for type, text in enumerate(("$A", "$B"))
    )
    return _layout(one, f"{one} {other}")(backend, settings)


def _albert_template(
    backend: tokenizers.Tokenizer, settings: Settings
) -> processors.PostProcessor | None:
    """Makes BERT's template unless begin and end tokens are requested."""
    stated = {"add_bos_token", "add_eos_token"} & settings.values.keys()
    return (_plain_template if stated else BERT.template)(backend, settings)


def _roberta_template(
    backend: tokenizers.Tokenizer, settings: Settings
) -> processors.PostProcessor:
    begin, end = settings.named("cls_token"), settings.named("sep_token")
    return processors.RobertaProcessing(
        _with_id(backend, end),
        _with_id(backend, begin),
        settings.flag("trim_offsets", True),
        settings.flag("add_prefix_space", False),
    )


def _mpnet_template(backend: tokenizers.Tokenizer, settings: Settings) -> processors.PostProcessor:
    usual = settings.changed(trim_offsets=True, add_prefix_space=False)
    return _roberta_template(backend, usual)


def _language_layout(languages: tuple[str, ...], single: str, pair: str) -> Template:
    """Makes a template with the language ``src_lang`` of a text."""
    known: object = Literal[languages]  # pyright: ignore

    def template(
        backend: tokenizers.Tokenizer, settings: Settings
    ) -> processors.PostProcessor | None:
        language = settings.get("src_lang", known, "en_XX")
        return _layout(single, pair)(backend, settings.changed(src_lang=language))

    return template


@dataclass(frozen=True, kw_only=True)
class Family:
    """A class of tokenizers."""

    classes: tuple[str, ...] = ()
    """The names of the class in transformers, without ``Fast``."""
    model_types: tuple[str, ...] = ()
    """The model types that use this class unless their files state another."""
    model: Literal["BPE", "Unigram", "WordPiece"] = "BPE"
    """The kind of vocabulary."""
    files: tuple[str, ...] = ()
    """The files of a vocabulary without ``tokenizer.json``."""
    tokens: Mapping[str, Token | None] = field(default_factory=dict)
    """The special tokens of roles that the files do not state."""
    backend: Callable[[Vocabulary, Settings], tokenizers.Tokenizer]
    """Makes the tokenizer without its added tokens and its template."""
    rearranged: Callable[[Vocabulary, Settings], Vocabulary] = _as_stated
    """Renumbers the pieces of a sentencepiece file as the family does."""
    extra: Callable[[Vocabulary, Settings], list[Token]] = _controls
    """Returns the special tokens without a role, if no ``extra_special_tokens`` are stated."""
    template: Template = _stated_template
    """Makes the template."""
    plain_specials: bool = False
    """Whether special tokens lose the other properties that the files give them."""
    every_byte: bool = True
    """Whether each byte must have a piece in ``vocab.json``."""


def _tokenizer(
    model: models.Model,
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    decoder: decoders.Decoder,
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    return backend


def _pairs(vocabulary: Vocabulary, **options: str | bool) -> models.BPE:
    return models.BPE(dict(vocabulary.ids), list(vocabulary.merges), **options)


# BERT: WordPiece.


def _bert(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    unknown = settings.named("unk_token")
    if unknown not in vocabulary.ids:
        raise DataError(
            f"{settings.file}: unk_token {unknown!r} is not in the vocabulary: name one of its "
            "pieces"
        )
    normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        # If None, the library strips accents whenever it lowercases.
        strip_accents=settings.get("strip_accents", bool),
        lowercase=settings.flag("do_lower_case", True),
    )
    model = models.WordPiece(dict(vocabulary.ids), unk_token=unknown)
    splitting = pre_tokenizers.BertPreTokenizer()
    return _tokenizer(model, normalizer, splitting, decoders.WordPiece(prefix="##"))


# BPE: GPT-2's alphabet of bytes, and GPT's characters.


def _byte_level(
    normalizer: normalizers.Normalizer | None = None, words: str | None = None
) -> Callable[[Vocabulary, Settings], tokenizers.Tokenizer]:
    """Returns a backend; ``words`` is the pattern of words, GPT-2's if None."""

    def backend(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
        prefix = settings.flag("add_prefix_space", False)
        alphabet = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=words is None)
        splitting: pre_tokenizers.PreTokenizer = alphabet
        if words is not None:
            first = pre_tokenizers.Split(Regex(words), "isolated")
            splitting = pre_tokenizers.Sequence([first, alphabet])
        return _tokenizer(_pairs(vocabulary), normalizer, splitting, decoders.ByteLevel())

    return backend


def _openai_gpt(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    unknown = settings.named("unk_token")
    model = _pairs(vocabulary, unk_token=unknown, end_of_word_suffix="</w>")
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitting = pre_tokenizers.BertPreTokenizer()
    return _tokenizer(model, normalizer, splitting, decoders.BPEDecoder(suffix="</w>"))


# Llama and Gemma: BPE over characters, and bytes for characters that are not pieces.

_FALLS_BACK = {"fuse_unk": True, "byte_fallback": True}
_SPACES_AND_BYTES = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def _llama(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    prefix = settings.flag("add_prefix_space", True)
    # Legacy tokenizers put a space before each part between added tokens, not only before the first
    # part.
    scheme = "always" if settings.flag("legacy", False) else "first"
    splitting = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme if prefix else "never", split=False
    )
    strip = when(prefix, decoders.Strip(content=" ", left=1))
    decoder = decoders.Sequence([*_SPACES_AND_BYTES, *strip])
    return _tokenizer(_pairs(vocabulary, **_FALLS_BACK), None, splitting, decoder)


def _gemma(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    model = _pairs(vocabulary, unk_token=settings.named("unk_token"), **_FALLS_BACK)
    normalizer = normalizers.Replace(" ", SPACE)
    # This step has no effect, because the normalizer leaves no space to split at, but transformers
    # has it as well.
    splitting = pre_tokenizers.Split(" ", "merged_with_previous")
    return _tokenizer(model, normalizer, splitting, decoders.Sequence(_SPACES_AND_BYTES))


# T5, Pegasus, mBART, XLM-R and CamemBERT: unigram models.


def _unigrams(
    vocabulary: Vocabulary,
    unknown: int,
    rules: Sequence[normalizers.Normalizer],
    *,
    splits_words: bool = False,
    scheme: Literal["always", "never"] = "always",
) -> tokenizers.Tokenizer:
    """Makes a unigram tokenizer that, with the scheme "always", puts a space before each text."""
    metaspace = {"replacement": SPACE, "prepend_scheme": scheme, "split": True}
    splitting: pre_tokenizers.PreTokenizer = pre_tokenizers.Metaspace(**metaspace)
    if splits_words:
        splitting = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), splitting])
    return _tokenizer(
        models.Unigram(list(vocabulary.scores), unknown),
        normalizers.Sequence(list(rules)) if rules else None,
        splitting,
        decoders.Metaspace(**metaspace),
    )


_ONE_SPACE = normalizers.Replace(Regex(" {2,}"), " ")


def _t5(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    del settings
    return _unigrams(vocabulary, 2, precompiled(vocabulary.charsmap), splits_words=True)


def _sentinels(settings: Settings) -> list[str]:
    return [f"<extra_id_{number}>" for number in range(settings.number("extra_ids", 100))]


def _albert(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    accents = normalizers.NFKD(), normalizers.StripAccents()
    rules = [
        *(normalizers.Replace(quotes, '"') for quotes in ("``", "''")),
        *when(not settings.flag("keep_accents", False), *accents),
        *when(settings.flag("do_lower_case", True), normalizers.Lowercase()),
        *precompiled(vocabulary.charsmap),
    ]
    scheme = "always" if settings.flag("add_prefix_space", True) else "never"
    return _unigrams(vocabulary, 1, rules, splits_words=True, scheme=scheme)


def _deberta(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    # Version 2 has a vocabulary of unigrams. transformers does not use its normalization.
    unknown, prefix = settings.named("unk_token"), settings.flag("add_prefix_space", True)
    pieces = list(vocabulary.scores)
    named = (unknown, 0.0) in pieces
    unknown_id = pieces.index((unknown, 0.0)) if named else vocabulary.unknown
    scheme = "always" if prefix else "first"
    rules = [
        *when(settings.flag("do_lower_case", False), normalizers.Lowercase()),
        normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
        normalizers.NFC(),
        normalizers.Strip(left=False, right=True),
    ]
    splitting = [
        *when(settings.flag("split_by_punct", False), pre_tokenizers.Punctuation("isolated")),
        pre_tokenizers.Metaspace(SPACE, scheme),
    ]
    return _tokenizer(
        models.Unigram(pieces, unknown_id),
        normalizers.Sequence(rules),
        pre_tokenizers.Sequence(splitting),
        decoders.Metaspace(SPACE, scheme),
    )


def _with_sentinels(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    # <extra_id_0> has the last id.
    last = [(name, 0.0) for name in reversed(_sentinels(settings))]
    return dataclasses.replace(vocabulary, scores=[*vocabulary.scores, *last])


def _t5_extra(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    stated, sentinels = _controls(vocabulary, settings), _sentinels(settings)
    # If the files also list the sentinels, their number must agree.
    known = [token for token in stated if "<extra_id_" in name_of(token)]
    if known and sentinels and len(known) != len(sentinels):
        raise DataError(
            f"{settings.file}: extra_ids {len(sentinels)} is not the number of <extra_id_…> in "
            f"additional_special_tokens, {len(known)}: correct one of them"
        )
    return stated if known else [*stated, *sentinels]


def _pegasus(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    name = settings.named("unk_token")
    # The id depends on the number of reserved tokens before it.
    ids = [id for id, piece in enumerate(vocabulary.scores) if piece == (name, 0.0)]
    if not ids:
        raise DataError(f"{settings.file.parent}: the vocabulary has no {name}: fetch it again")
    rules = precompiled(vocabulary.charsmap) or [normalizers.Replace(Regex(r"\n"), " ")]
    return _unigrams(vocabulary, ids[0], [*rules, _ONE_SPACE])


def _with_masks(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    # The defaults of this class differ from the defaults of the record, as in transformers.
    stated = settings.stated
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


def _mbart(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    # transformers does not normalize the text of mBART.
    del settings
    return _unigrams(vocabulary, 3, [], splits_words=True)


def _mbart50(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    del settings
    return _unigrams(vocabulary, 3, [*precompiled(vocabulary.charsmap), _ONE_SPACE])


def _xlm_roberta(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    return _words(vocabulary, settings, 3)


def _camembert(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    unknown = settings.named("unk_token")
    ids = [id for id, (piece, _) in enumerate(vocabulary.scores) if piece == unknown]
    return _words(vocabulary, settings, ids[0] if ids else 0)


def _words(vocabulary: Vocabulary, settings: Settings, unknown: int) -> tokenizers.Tokenizer:
    """Makes a unigram tokenizer that puts a space before each word, unless a setting forbids it."""
    return _unigrams(
        vocabulary,
        unknown,
        precompiled(vocabulary.charsmap),
        splits_words=True,
        scheme="always" if settings.flag("add_prefix_space", True) else "never",
    )


_UNUSED = ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")


def _as_camembert(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    """Numbers pieces as CamemBERT: five tokens, all pieces but the first, and the mask."""
    begin, end, unknown = _UNUSED
    pad, unk, mask = map(settings.named, ("pad_token", "unk_token", "mask_token"))
    start = [(begin, 0.0), (pad, 0.0), (end, 0.0), (unk, 0.0), (unknown, -100.0)]
    scores = [*start, *vocabulary.scores[1:], (mask, 0.0)]
    return dataclasses.replace(vocabulary, scores=scores)


def _camembert_extra(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    del vocabulary
    return settings.tokens("additional_special_tokens") or list(_UNUSED)


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


_BYTE_FILES = ("vocab.json", "merges.txt")
_ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_ROBERTA = {**_ENDS, "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>"}
_MASK = AddedToken("<mask>", lstrip=True)
_TWO_ENDS = _layout("bos_token $A eos_token", "bos_token $A eos_token eos_token $B eos_token")

BERT = Family(
    classes=("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"),
    model_types=("bert", "distilbert", "electra", "mobilebert", "nomic_bert"),
    model="WordPiece",
    files=("vocab.txt",),
    tokens={f"{role}_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")},
    backend=_bert,
    template=_layout(
        "cls_token:0 $A:0 sep_token:0", "cls_token:0 $A:0 sep_token:0 $B:1 sep_token:1"
    ),
)
_BERT_ENDS = {**BERT.tokens, "bos_token": "[CLS]", "eos_token": "[SEP]"}
MPNET = Family(
    classes=("MPNetTokenizer",),
    model_types=("mpnet",),
    model="WordPiece",
    files=("vocab.txt",),
    tokens={**_ROBERTA, "unk_token": "[UNK]", "mask_token": _MASK},
    backend=_bert,
    template=_mpnet_template,
)
_END = dict.fromkeys(("unk_token", "bos_token", "eos_token"), END_OF_TEXT)
GPT2 = Family(
    classes=("GPT2Tokenizer",),
    model_types=("gpt2", "gpt_neo", "gptj", "opt"),
    files=_BYTE_FILES,
    tokens={**_END, "pad_token": None},
    backend=_byte_level(),
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
    template=_layout("$A eos_token", "$A eos_token $B eos_token"),
)
FAMILIES = (
    BERT,
    MPNET,
    GPT2,
    T5,
    Family(
        classes=(
            *("RobertaTokenizer", "BartTokenizer", "LEDTokenizer", "LongformerTokenizer"),
            "MvpTokenizer",
        ),
        model_types=("roberta", "roberta-prelayernorm", "bart"),
        files=_BYTE_FILES,
        tokens={**_ROBERTA, "mask_token": "<mask>"},
        backend=_byte_level(),
        template=_roberta_template,
    ),
    Family(
        classes=("DebertaTokenizer",),
        model_types=("deberta",),
        files=_BYTE_FILES,
        tokens={**_BERT_ENDS, "mask_token": AddedToken("[MASK]", lstrip=True)},
        backend=_byte_level(),
        template=_layout(
            "cls_token:0 $A:0 sep_token:0",
            "cls_token:0 $A:0 sep_token:0 sep_token:0 $B:0 sep_token:0",
        ),
    ),
    Family(
        classes=("DebertaV2Tokenizer",),
        model_types=("deberta-v2",),
        model="Unigram",
        files=("spm.model",),
        tokens=_BERT_ENDS,
        backend=_deberta,
        template=BERT.template,
    ),
    Family(
        classes=("AlbertTokenizer",),
        model_types=("albert",),
        model="Unigram",
        files=("spiece.model",),
        tokens={**_BERT_ENDS, "unk_token": "<unk>", "pad_token": "<pad>"},
        backend=_albert,
        template=_albert_template,
    ),
    Family(
        classes=("GPTNeoXTokenizer",),
        model_types=("gpt_neox",),
        files=_BYTE_FILES,
        tokens={**_END, "pad_token": "<|padding|>"},
        backend=_byte_level(normalizers.NFC()),
        template=_plain_template,
    ),
    Family(
        classes=("Qwen2Tokenizer",),
        model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        files=_BYTE_FILES,
        tokens={**_END, "bos_token": None, "pad_token": END_OF_TEXT},
        backend=_byte_level(normalizers.NFC(), _QWEN2_WORDS),
        plain_specials=True,
    ),
    Family(
        classes=("OpenAIGPTTokenizer",),
        model_types=("openai-gpt",),
        files=_BYTE_FILES,
        tokens={"unk_token": "<unk>"},
        backend=_openai_gpt,
        every_byte=False,
    ),
    Family(
        classes=("LlamaTokenizer", "Phi3Tokenizer"),
        files=("tokenizer.model",),
        tokens=_ENDS,
        backend=_llama,
    ),
    Family(
        classes=("GemmaTokenizer",),
        model_types=("gemma", "gemma2", "gemma3", "gemma3_text"),
        files=("tokenizer.model",),
        tokens={f"{role}_token": f"<{role}>" for role in ("unk", "bos", "eos", "pad", "mask")},
        backend=_gemma,
    ),
    Family(
        classes=("PegasusTokenizer",),
        model_types=("pegasus",),
        model="Unigram",
        files=("spiece.model",),
        tokens={**T5.tokens, "mask_token": "<mask_2>"},
        backend=_pegasus,
        rearranged=_with_masks,
        extra=_pegasus_extra,
        template=_layout("$A eos_token", "$A $B eos_token"),
    ),
    Family(
        classes=("XLMRobertaTokenizer",),
        model_types=("xlm-roberta", "gte", "new"),
        model="Unigram",
        files=("sentencepiece.bpe.model",),
        tokens={**_ROBERTA, "mask_token": "<mask>"},
        backend=_xlm_roberta,
        rearranged=_as_fairseq((), "bos_token"),
        template=_TWO_ENDS,
    ),
    Family(
        classes=("CamembertTokenizer",),
        model_types=("camembert",),
        model="Unigram",
        files=("sentencepiece.bpe.model",),
        tokens={**_ROBERTA, "mask_token": _MASK},
        backend=_camembert,
        rearranged=_as_camembert,
        extra=_camembert_extra,
        template=_TWO_ENDS,
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
        template=_language_layout(
            LANGUAGES_25, "$A eos_token src_lang", "$A $B eos_token src_lang"
        ),
    ),
    Family(
        classes=("MBart50Tokenizer",),
        model="Unigram",
        files=("sentencepiece.bpe.model",),
        tokens={k: v for k, v in _ROBERTA.items() if k != "bos_token"} | {"mask_token": _MASK},
        backend=_mbart50,
        rearranged=_as_fairseq(LANGUAGES_50, "cls_token"),
        extra=_mbart50_extra,
        template=_language_layout(
            LANGUAGES_50, "src_lang $A eos_token", "src_lang $A $B eos_token"
        ),
    ),
)

_BY_TYPE = {name: family for family in FAMILIES for name in family.model_types}
_BY_CLASS = {name: family for family in FAMILIES for name in family.classes}
# Models that use `tokenizer.json` or `tokenizer.model` unchanged, even if their files state a
# class.
_GENERIC_TYPES = ("mistral", "mixtral", "phi3", "olmo2", "olmo3", "granite", "stablelm")
FIXED_TYPES = ("qwen2",)
"""Models whose class replaces the stated class, unless there is an ``auto_map``."""


def family_of(folder: Folder) -> Family | None:
    """Returns the family of a folder as ``AutoTokenizer`` chooses it.

    Returns:
      The family, or None to use ``tokenizer.json`` or ``tokenizer.model`` unchanged.
    """
    model_type, class_name = folder.model_type, folder.class_name
    if folder.keeps_class and class_name is not None:
        return _BY_CLASS.get(class_name)
    # Some byte-level vocabularies state LlamaTokenizer, whose class would split them wrongly.
    if model_type in _GENERIC_TYPES or (class_name == "LlamaTokenizer" and folder.is_byte_level):
        return None
    if class_name is None or model_type in FIXED_TYPES:
        return _BY_TYPE.get(str(model_type))
    return _BY_CLASS.get(class_name)
