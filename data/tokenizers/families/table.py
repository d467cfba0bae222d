"""Describes how transformers 5 creates the tokenizer of each model family from its vocabulary.

The table has one record for each tokenizer class of transformers (``models/*/tokenization_*.py``),
with its special tokens, its normalizer, its pre-tokenizer, its decoder and its template. Such a
class reads only the vocabulary from a ``tokenizer.json``, and applies these steps to it as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from ..base import END_OF_TEXT
from ..folder import Folder, Settings, Token
from ..frame import FIXED_TYPES, GENERIC_TYPES
from . import byte_pairs, templates, unigrams
from .vocabulary import Vocabulary, controls


def _as_stated(vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    del settings
    return vocabulary


@dataclass(frozen=True, kw_only=True)
class Family:
    """The description of a tokenizer class in transformers."""

    classes: tuple[str, ...] = ()
    """The names of the class in transformers, without ``Fast``."""
    model_types: tuple[str, ...] = ()
    """The model types that use this class if their files do not state another class."""
    model: Literal["BPE", "Unigram", "WordPiece"] = "BPE"
    """The kind of vocabulary."""
    files: tuple[str, ...] = ()
    """The files that contain the vocabulary if there is no ``tokenizer.json``."""
    tokens: Mapping[str, Token | None] = field(default_factory=dict)
    """The default special token for each role, which is used if the files do not state one."""
    backend: Callable[[Vocabulary, Settings], tokenizers.Tokenizer]
    """Creates the tokenizer, but without its added tokens and its template."""
    rearranged: Callable[[Vocabulary, Settings], Vocabulary] = _as_stated
    """Assigns ids to the pieces of a sentencepiece file in the order that the family uses."""
    extra: Callable[[Vocabulary, Settings], list[Token]] = controls
    """Returns the special tokens that have no role. It is called if the files do not state
    ``extra_special_tokens``."""
    template: templates.Template = templates.stated_template
    """Creates the template."""
    plain_specials: bool = False
    """Whether to ignore the properties that the files state for special tokens."""
    alphabet: frozenset[str] = frozenset(pre_tokenizers.ByteLevel.alphabet())
    """The pieces that ``vocab.json`` must contain. By default, these are the pieces for all bytes.
    """


_BYTE_FILES = ("vocab.json", "merges.txt")
_ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_ROBERTA = {**_ENDS, "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>"}
_MASK = AddedToken("<mask>", lstrip=True)
_TWO_ENDS = templates.layout(
    "bos_token $A eos_token", "bos_token $A eos_token eos_token $B eos_token"
)

BERT = Family(
    classes=("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"),
    model_types=("bert", "distilbert", "electra", "mobilebert", "nomic_bert"),
    model="WordPiece",
    files=("vocab.txt",),
    tokens={f"{role}_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")},
    backend=byte_pairs.bert,
    template=templates.BERT_LAYOUT,
)
_BERT_ENDS = {**BERT.tokens, "bos_token": "[CLS]", "eos_token": "[SEP]"}
MPNET = Family(
    classes=("MPNetTokenizer",),
    model_types=("mpnet",),
    model="WordPiece",
    files=("vocab.txt",),
    tokens={**_ROBERTA, "unk_token": "[UNK]", "mask_token": _MASK},
    backend=byte_pairs.bert,
    template=templates.mpnet_template,
)
_END = dict.fromkeys(("unk_token", "bos_token", "eos_token"), END_OF_TEXT)
GPT2 = Family(
    classes=("GPT2Tokenizer",),
    model_types=("gpt2", "gpt_neo", "gptj", "opt"),
    files=_BYTE_FILES,
    tokens={**_END, "pad_token": None},
    backend=byte_pairs.byte_level(),
)
T5 = Family(
    classes=("T5Tokenizer",),
    model_types=("t5", "mt5"),
    model="Unigram",
    files=("spiece.model",),
    tokens={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    backend=unigrams.t5,
    rearranged=unigrams.with_sentinels,
    extra=unigrams.t5_extra,
    template=templates.layout("$A eos_token", "$A eos_token $B eos_token"),
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
        backend=byte_pairs.byte_level(),
        template=templates.roberta_template,
    ),
    Family(
        classes=("DebertaTokenizer",),
        model_types=("deberta",),
        files=_BYTE_FILES,
        tokens={**_BERT_ENDS, "mask_token": AddedToken("[MASK]", lstrip=True)},
        backend=byte_pairs.byte_level(),
        template=templates.layout(
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
        backend=unigrams.deberta,
        template=templates.BERT_LAYOUT,
    ),
    Family(
        classes=("AlbertTokenizer",),
        model_types=("albert",),
        model="Unigram",
        files=("spiece.model",),
        tokens={**_BERT_ENDS, "unk_token": "<unk>", "pad_token": "<pad>"},
        backend=unigrams.albert,
        template=templates.albert_template,
    ),
    Family(
        classes=("GPTNeoXTokenizer",),
        model_types=("gpt_neox",),
        files=_BYTE_FILES,
        tokens={**_END, "pad_token": "<|padding|>"},
        backend=byte_pairs.byte_level(normalizers.NFC()),
        template=templates.plain_template,
    ),
    Family(
        classes=("Qwen2Tokenizer",),
        model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        files=_BYTE_FILES,
        tokens={**_END, "bos_token": None, "pad_token": END_OF_TEXT},
        backend=byte_pairs.byte_level(normalizers.NFC(), byte_pairs.QWEN2_WORDS),
        plain_specials=True,
    ),
    Family(
        classes=("OpenAIGPTTokenizer",),
        model_types=("openai-gpt",),
        files=_BYTE_FILES,
        tokens={"unk_token": "<unk>"},
        backend=byte_pairs.openai_gpt,
        alphabet=frozenset(),
    ),
    Family(
        classes=("LlamaTokenizer", "Phi3Tokenizer"),
        files=("tokenizer.model",),
        tokens=_ENDS,
        backend=byte_pairs.llama,
    ),
    Family(
        classes=("GemmaTokenizer",),
        model_types=("gemma", "gemma2", "gemma3", "gemma3_text"),
        files=("tokenizer.model",),
        tokens={f"{role}_token": f"<{role}>" for role in ("unk", "bos", "eos", "pad", "mask")},
        backend=byte_pairs.gemma,
    ),
    Family(
        classes=("PegasusTokenizer",),
        model_types=("pegasus",),
        model="Unigram",
        files=("spiece.model",),
        tokens={**T5.tokens, "mask_token": "<mask_2>"},
        backend=unigrams.pegasus,
        rearranged=unigrams.with_masks,
        extra=unigrams.pegasus_extra,
        template=templates.layout("$A eos_token", "$A $B eos_token"),
    ),
    Family(
        classes=("XLMRobertaTokenizer",),
        model_types=("xlm-roberta", "gte", "new"),
        model="Unigram",
        files=("sentencepiece.bpe.model",),
        tokens={**_ROBERTA, "mask_token": "<mask>"},
        backend=unigrams.xlm_roberta,
        rearranged=unigrams.as_fairseq((), "bos_token"),
        template=_TWO_ENDS,
    ),
    Family(
        classes=("CamembertTokenizer",),
        model_types=("camembert",),
        model="Unigram",
        files=("sentencepiece.bpe.model",),
        tokens={**_ROBERTA, "mask_token": _MASK},
        backend=unigrams.camembert,
        rearranged=unigrams.as_camembert,
        extra=unigrams.camembert_extra,
        template=_TWO_ENDS,
    ),
    Family(
        classes=("MBartTokenizer",),
        model_types=("mbart",),
        model="Unigram",
        files=("sentencepiece.bpe.model",),
        tokens={**_ROBERTA, "mask_token": _MASK},
        backend=unigrams.mbart,
        rearranged=unigrams.as_fairseq(unigrams.LANGUAGES_25, "bos_token"),
        extra=unigrams.mbart_extra,
        template=templates.language_layout(
            unigrams.LANGUAGES_25, "$A eos_token src_lang", "$A $B eos_token src_lang"
        ),
    ),
    Family(
        classes=("MBart50Tokenizer",),
        model="Unigram",
        files=("sentencepiece.bpe.model",),
        tokens={k: v for k, v in _ROBERTA.items() if k != "bos_token"} | {"mask_token": _MASK},
        backend=unigrams.mbart50,
        rearranged=unigrams.as_fairseq(unigrams.LANGUAGES_50, "cls_token"),
        extra=unigrams.mbart50_extra,
        template=templates.language_layout(
            unigrams.LANGUAGES_50, "src_lang $A eos_token", "src_lang $A $B eos_token"
        ),
    ),
)

_BY_TYPE = {name: family for family in FAMILIES for name in family.model_types}
_BY_CLASS = {name: family for family in FAMILIES for name in family.classes}


def family_of(folder: Folder) -> Family | None:
    """Returns the family of a folder, which is chosen in the same way as by ``AutoTokenizer``.

    Returns:
      The family, or None to use ``tokenizer.json`` or ``tokenizer.model`` unchanged.
    """
    class_name = folder.class_name
    if folder.keeps_class:
        return _BY_CLASS.get(class_name)
    # Some folders with a byte-level vocabulary state LlamaTokenizer, which would split text
    # wrongly.
    if folder.model_type in GENERIC_TYPES or (
        class_name == "LlamaTokenizer" and folder.is_byte_level
    ):
        return None
    if not class_name or folder.model_type in FIXED_TYPES:
        return _BY_TYPE.get(folder.model_type)
    return _BY_CLASS.get(class_name)
