"""From text to batches of numpy arrays.

The way through: a ``DataConfig`` (``CausalData``, ``PretrainingData``, ``ClassificationData``,
``TaggingData``, ``SpanData``, ``ChoiceData``, ``TranslationData``) reads its source,
``train_tokenizer`` or ``load_tokenizer`` gives the vocabulary, the config's splits are
``Rows``, and ``train_iterator`` makes batches of them. Everything is imported when first
asked for, so ``import flaxzoo.data`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .byte_pairs import byte_pair_table, merge_byte_pairs
    from .causal import CausalData, CausalEvaluationRows, CausalRows
    from .choices import ChoiceData, ChoiceRows
    from .classification import ClassificationData, ClassificationRows
    from .config import DataConfig
    from .corpus import TokenCorpus, build_corpus, open_corpus
    from .documents import Documents, default_cache_dir, load_documents, load_whole
    from .errors import DataError
    from .mlm import Masking
    from .next_sentence import Segments
    from .number_words import NumberWords, spell
    from .packing import Packing
    from .pair_corpus import PairCorpus, build_pair_corpus
    from .pair_sources import Pair
    from .parallel_text import ParallelText, open_parallel
    from .pipeline import BatchIterator, TrainBatches, evaluation_batches, train_iterator
    from .prepared import PreparedRows
    from .preparing import prepare
    from .pretraining import PretrainingData, PretrainingRows
    from .rows import DataSplit, Rows
    from .sentence_corpus import SentenceCorpus, build_sentence_corpus
    from .sentences import split_sentences
    from .sources import Source, parse_source, parse_sources, read_documents
    from .spans import SpanData, SpanRows
    from .tagging import TaggingData, TaggingRows
    from .text_lines import read_lines
    from .tokenizer import SpecialIds, Tokenizer, load_tokenizer
    from .tokenizer_export import export_tokenizer
    from .tokenizer_training import TokenizerConfig, train_tokenizer
    from .translation import (
        NumberRows,
        TranslationData,
        TranslationRows,
        encode_source,
        start_and_end,
    )

_HOME = {
    "byte_pairs": ("byte_pair_table", "merge_byte_pairs"),
    "causal": ("CausalData", "CausalEvaluationRows", "CausalRows"),
    "packing": ("Packing",),
    "choices": ("ChoiceData", "ChoiceRows"),
    "classification": ("ClassificationData", "ClassificationRows"),
    "config": ("DataConfig",),
    "corpus": ("TokenCorpus", "build_corpus", "open_corpus"),
    "documents": ("Documents", "default_cache_dir", "load_documents", "load_whole"),
    "errors": ("DataError",),
    "mlm": ("Masking",),
    "next_sentence": ("Segments",),
    "number_words": ("NumberWords", "spell"),
    "pair_corpus": ("PairCorpus", "build_pair_corpus"),
    "pair_sources": ("Pair",),
    "parallel_text": ("ParallelText", "open_parallel"),
    "pipeline": ("BatchIterator", "TrainBatches", "evaluation_batches", "train_iterator"),
    "prepared": ("PreparedRows",),
    "preparing": ("prepare",),
    "pretraining": ("PretrainingData", "PretrainingRows"),
    "rows": ("DataSplit", "Rows"),
    "sentence_corpus": ("SentenceCorpus", "build_sentence_corpus"),
    "sentences": ("split_sentences",),
    "sources": ("Source", "parse_source", "parse_sources", "read_documents"),
    "spans": ("SpanData", "SpanRows"),
    "tagging": ("TaggingData", "TaggingRows"),
    "text_lines": ("read_lines",),
    "tokenizer": ("SpecialIds", "Tokenizer", "load_tokenizer"),
    "tokenizer_export": ("export_tokenizer",),
    "tokenizer_training": ("TokenizerConfig", "train_tokenizer"),
    "translation": (
        "NumberRows",
        "TranslationData",
        "TranslationRows",
        "encode_source",
        "start_and_end",
    ),
}
_FILE_OF = {name: file for file, names in _HOME.items() for name in names}

__all__ = [
    "BatchIterator",
    "CausalData",
    "CausalEvaluationRows",
    "CausalRows",
    "ChoiceData",
    "ChoiceRows",
    "ClassificationData",
    "ClassificationRows",
    "DataConfig",
    "DataError",
    "DataSplit",
    "Documents",
    "Masking",
    "NumberRows",
    "NumberWords",
    "Packing",
    "Pair",
    "PairCorpus",
    "ParallelText",
    "PreparedRows",
    "PretrainingData",
    "PretrainingRows",
    "Rows",
    "Segments",
    "SentenceCorpus",
    "Source",
    "SpanData",
    "SpanRows",
    "SpecialIds",
    "TaggingData",
    "TaggingRows",
    "TokenCorpus",
    "Tokenizer",
    "TokenizerConfig",
    "TrainBatches",
    "TranslationData",
    "TranslationRows",
    "build_corpus",
    "build_pair_corpus",
    "build_sentence_corpus",
    "byte_pair_table",
    "default_cache_dir",
    "encode_source",
    "evaluation_batches",
    "export_tokenizer",
    "load_documents",
    "load_tokenizer",
    "load_whole",
    "merge_byte_pairs",
    "open_corpus",
    "open_parallel",
    "parse_source",
    "parse_sources",
    "prepare",
    "read_documents",
    "read_lines",
    "spell",
    "split_sentences",
    "start_and_end",
    "train_iterator",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name in _FILE_OF:
        return getattr(import_module(f".{_FILE_OF[name]}", __name__), name)
    if name in _HOME:  # the files themselves: flaxzoo.data.packing
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
