"""Creates unigram tokenizers: T5, ALBERT, DeBERTa, Pegasus, mBART, XLM-R and CamemBERT."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from ...common.errors import DataError
from ...common.fields import require
from ..base import SPACE
from ..folder import Settings, Token, name_of
from ..sentencepiece_model import precompiled, when
from .vocabulary import Vocabulary, controls, make_tokenizer

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


def _unigrams(
    vocabulary: Vocabulary,
    unknown: int,
    rules: Sequence[normalizers.Normalizer],
    *,
    splits_words: bool = False,
    scheme: Literal["always", "never"] = "always",
) -> tokenizers.Tokenizer:
    """Creates a unigram tokenizer. The scheme "always" puts a space before each text."""
    metaspace = {"replacement": SPACE, "prepend_scheme": scheme, "split": True}
    splitting: pre_tokenizers.PreTokenizer = pre_tokenizers.Metaspace(**metaspace)
    if splits_words:
        splitting = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), splitting])
    return make_tokenizer(
        models.Unigram(list(vocabulary.scores), unknown),
        normalizers.Sequence(list(rules)) if rules else None,
        splitting,
        decoders.Metaspace(**metaspace),
    )


_ONE_SPACE = normalizers.Replace(Regex(" {2,}"), " ")


def t5(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates T5's tokenizer."""
    del settings
    return _unigrams(vocabulary, 2, precompiled(vocabulary.charsmap), splits_words=True)


def _sentinels(settings: Settings) -> list[str]:
    return [f"<extra_id_{number}>" for number in range(settings.number("extra_ids", 100))]


def albert(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates ALBERT's tokenizer, which normalizes quotes, accents and case."""
    accents = normalizers.NFKD(), normalizers.StripAccents()
    rules = [
        *(normalizers.Replace(quotes, '"') for quotes in ("``", "''")),
        *when(not settings.flag("keep_accents", False), *accents),
        *when(settings.flag("do_lower_case", True), normalizers.Lowercase()),
        *precompiled(vocabulary.charsmap),
    ]
    return _unigrams(vocabulary, 1, rules, splits_words=True, scheme=_scheme(settings))


def _scheme(settings: Settings) -> Literal["always", "never"]:
    """Returns the scheme for putting a space before words, which depends on a setting."""
    return "always" if settings.flag("add_prefix_space", True) else "never"


def deberta(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates the tokenizer of DeBERTa versions 2 and 3."""
    # Version 2 also has a unigram vocabulary, but transformers does not use its normalization.
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
    return make_tokenizer(
        models.Unigram(pieces, unknown_id),
        normalizers.Sequence(rules),
        pre_tokenizers.Sequence(splitting),
        decoders.Metaspace(SPACE, scheme),
    )


def with_sentinels(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    """Appends T5's sentinels to the pieces."""
    # Sentinels are counted from the end, so <extra_id_0> has the last id.
    last = [(name, 0.0) for name in reversed(_sentinels(settings))]
    return dataclasses.replace(vocabulary, scores=[*vocabulary.scores, *last])


def t5_extra(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    """Returns the special tokens that T5's files state, and its sentinels."""
    stated, sentinels = controls(vocabulary, settings), _sentinels(settings)
    # If the files also list the sentinels, their number must be the same as in the setting.
    known = [token for token in stated if "<extra_id_" in name_of(token)]
    require(
        not known or not sentinels or len(known) == len(sentinels),
        f"{settings.file}: extra_ids {len(sentinels)} is not the number of <extra_id_…> in "
        f"additional_special_tokens, {len(known)}: correct one of them",
        DataError,
    )
    return stated if known else [*stated, *sentinels]


def pegasus(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates Pegasus's tokenizer."""
    name = settings.named("unk_token")
    # The id of the unknown token depends on the number of reserved tokens before it.
    ids = [id for id, piece in enumerate(vocabulary.scores) if piece == (name, 0.0)]
    require(ids, f"{settings.file.parent}: the vocabulary has no {name}: fetch it again", DataError)
    rules = precompiled(vocabulary.charsmap) or [normalizers.Replace(Regex(r"\n"), " ")]
    return _unigrams(vocabulary, ids[0], [*rules, _ONE_SPACE])


def with_masks(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    """Puts the reserved tokens of Pegasus before the pieces."""
    # As in transformers, these defaults differ from the special tokens in the table.
    stated = settings.stated
    names = [stated.get("mask_token", "<mask_1>"), stated.get("mask_token_sent", "<mask_2>")]
    masks = [str(getattr(name, "content", name)) for name in names if name is not None]
    # The reserved tokens (padding, end, masks and unused tokens) have the lowest ids.
    ends = [settings.named("pad_token"), settings.named("eos_token")]
    first = [(name, 0.0) for name in [*ends, *dict.fromkeys(masks)]]
    unused = [(f"<unk_{n}>", -100.0) for n in range(2, settings.number("offset", 103))]
    return dataclasses.replace(vocabulary, scores=[*first, *unused, *vocabulary.scores[2:]])


def pegasus_extra(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    """Returns Pegasus's mask token for sentences and its unused tokens."""
    mask = settings.values.get("mask_token_sent", "<mask_1>")
    stated = list(map(name_of, controls(vocabulary, settings)))
    of_sentences = [] if mask is None or mask in stated else [str(getattr(mask, "content", mask))]
    return [*of_sentences, *(f"<unk_{n}>" for n in range(2, settings.number("offset", 103)))]


def mbart(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates mBART's tokenizer, which does not normalize text."""
    del settings
    return _unigrams(vocabulary, 3, [], splits_words=True)


def mbart50(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates the tokenizer of mBART-50."""
    del settings
    return _unigrams(vocabulary, 3, [*precompiled(vocabulary.charsmap), _ONE_SPACE])


def xlm_roberta(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates XLM-R's tokenizer."""
    return _words(vocabulary, settings, 3)


def camembert(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
    """Creates CamemBERT's tokenizer."""
    unknown = settings.named("unk_token")
    ids = [id for id, (piece, _) in enumerate(vocabulary.scores) if piece == unknown]
    return _words(vocabulary, settings, ids[0] if ids else 0)


def _words(vocabulary: Vocabulary, settings: Settings, unknown: int) -> tokenizers.Tokenizer:
    """Creates a unigram tokenizer that puts a space before words, unless a setting forbids it."""
    return _unigrams(
        vocabulary,
        unknown,
        precompiled(vocabulary.charsmap),
        splits_words=True,
        scheme=_scheme(settings),
    )


_UNUSED = ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")


def as_camembert(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    """Orders pieces as in CamemBERT: five tokens, all pieces except the first, then the mask."""
    begin, end, unknown = _UNUSED
    pad, unk, mask = map(settings.named, ("pad_token", "unk_token", "mask_token"))
    start = [(begin, 0.0), (pad, 0.0), (end, 0.0), (unk, 0.0), (unknown, -100.0)]
    scores = [*start, *vocabulary.scores[1:], (mask, 0.0)]
    return dataclasses.replace(vocabulary, scores=scores)


def camembert_extra(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    """Returns the special tokens that CamemBERT's files state, or its unused tokens if none."""
    del vocabulary
    return settings.tokens("additional_special_tokens") or list(_UNUSED)


def as_fairseq(
    languages: tuple[str, ...], first: str
) -> Callable[[Vocabulary, Settings], Vocabulary]:
    """Returns a function that orders pieces as in fairseq.

    The order is: four special tokens, all pieces from the fourth on, the languages, the mask.
    """

    def numbered(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
        roles = (first, "pad_token", "eos_token", "unk_token")
        start = [(settings.named(role), 0.0) for role in roles]
        end = [(name, 0.0) for name in (*languages, settings.named("mask_token"))]
        return dataclasses.replace(vocabulary, scores=[*start, *vocabulary.scores[3:], *end])

    return numbered


def mbart_extra(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    """Returns mBART's language tokens, then the special tokens that the files state."""
    return [*LANGUAGES_25, *controls(vocabulary, settings)]


def mbart50_extra(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    """Returns the special tokens that mBART-50's files state, then its language tokens."""
    return [*controls(vocabulary, settings), *LANGUAGES_50]
