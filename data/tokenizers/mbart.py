"""The vocabulary of mBART and mBART-50: a sentencepiece model, numbered as fairseq numbers it.

Liu et al. 2020, "Multilingual denoising pre-training for neural machine translation", section 2;
Tang et al. 2020 for the 50 languages. Ids 0 to 3 are ``<s>``, ``<pad>``, ``</s>`` and ``<unk>``;
the pieces of ``sentencepiece.bpe.model`` follow from its fourth on, then the codes of the
languages, and the mask. A source of mBART ends with ``</s>`` and the code of its language; one of
mBART-50 begins with the code and ends with ``</s>``.

The folder is read as transformers 5 reads it, which normalizes text for mBART-50 only.
"""

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import DataError, suggest
from .base import SpecialIds, read_json
from .huggingface import HuggingFaceTokenizer
from .sentencepiece import SPACE, SentencePieceTokenizer, parse_model

FILE = "sentencepiece.bpe.model"
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
_FIRST = ("<s>", "<pad>", "</s>", "<unk>")
_MASK = "<mask>"


def is_mbart(file: Path) -> bool:
    """Returns whether a file is the vocabulary of an mBART, as the files beside it say."""
    if file.name != FILE:
        return False
    name = _setting(file, "tokenizer_config.json", "tokenizer_class")
    if name is None:
        return _setting(file, "config.json", "model_type") == "mbart"
    return str(name).removesuffix("Fast") in ("MBartTokenizer", "MBart50Tokenizer")


def load_mbart(file: Path) -> HuggingFaceTokenizer:
    """Loads the vocabulary; ``tokenizer_config.json`` beside it may name the source's language.

    Args:
      file: ``sentencepiece.bpe.model``.

    Returns:
      The tokenizer. Its template adds the end and the code of ``src_lang``, by default ``en_XX``.

    Raises:
      DataError: The file is damaged, or the language is none of the model's.
    """
    proto = parse_model(SentencePieceTokenizer.from_file(file).model)
    name = str(_setting(file, "tokenizer_config.json", "tokenizer_class"))
    is_50 = name.startswith("MBart50")
    languages = LANGUAGES_50 if is_50 else LANGUAGES_25
    language = _setting(file, "tokenizer_config.json", "src_lang") or "en_XX"
    if language not in languages:
        raise DataError(
            f"{file.parent}: src_lang {language!r} is no language of the model: "
            f"{suggest(str(language), list(languages))}"
        )
    pieces = [(piece.piece, piece.score) for piece in proto.pieces[3:]]
    added = [(name, 0.0) for name in (*languages, _MASK)]
    vocabulary = [*((name, 0.0) for name in _FIRST), *pieces, *added]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, 3, byte_fallback=False))
    words = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    if is_50:
        rules: list[normalizers.Normalizer] = [normalizers.Replace(Regex(r" {2,}"), " ")]
        if proto.normalizer_spec.precompiled_charsmap:
            charsmap = proto.normalizer_spec.precompiled_charsmap
            rules.insert(0, normalizers.Precompiled(charsmap))
        backend.normalizer = normalizers.Sequence(rules)
        backend.pre_tokenizer = words
    else:
        splits = [pre_tokenizers.WhitespaceSplit(), words]
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    backend.add_special_tokens(
        [AddedToken(name, normalized=False, lstrip=name == _MASK) for name, _ in [*added]]
    )
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in _FIRST])
    ids = {name: id for id, (name, _) in enumerate(vocabulary)}
    backend.post_processor = processors.TemplateProcessing(
        single=f"{language} $A </s>" if is_50 else f"$A </s> {language}",
        pair=f"{language} $A $B </s>" if is_50 else f"$A $B </s> {language}",
        special_tokens=[(name, ids[name]) for name in ("</s>", language)],
    )
    special = SpecialIds(pad=1, unk=3, bos=0, eos=2, mask=ids[_MASK])
    return HuggingFaceTokenizer(backend, special)


def _setting(file: Path, name: str, key: str) -> object:
    beside = file.with_name(name)
    content = read_json(beside) if beside.is_file() else {}
    return content.get(key) if isinstance(content, dict) else None
