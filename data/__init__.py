"""From text to batches of numpy arrays.

The way through: ``load_documents`` → ``train_tokenizer`` or ``load_tokenizer`` →
``build_corpus`` → ``CausalRows`` → ``train_iterator``. Everything is imported when first
asked for, so ``import flaxzoo.data`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .byte_pairs import byte_pair_table, merge_byte_pairs
    from .causal import CausalData, CausalEvaluationRows, CausalRows, Packing
    from .config import DataConfig, DataSplit
    from .corpus import TokenCorpus, build_corpus, open_corpus
    from .documents import Documents, default_cache_dir, load_documents
    from .errors import DataError
    from .pipeline import BatchIterator, Rows, TrainBatches, evaluation_batches, train_iterator
    from .sources import Source, parse_source, read_documents
    from .tokenizer import SpecialIds, Tokenizer, load_tokenizer
    from .tokenizer_training import TokenizerConfig, train_tokenizer

_HOME = {
    "byte_pairs": ("byte_pair_table", "merge_byte_pairs"),
    "causal": ("CausalData", "CausalEvaluationRows", "CausalRows", "Packing"),
    "config": ("DataConfig", "DataSplit"),
    "corpus": ("TokenCorpus", "build_corpus", "open_corpus"),
    "documents": ("Documents", "default_cache_dir", "load_documents"),
    "errors": ("DataError",),
    "pipeline": ("BatchIterator", "Rows", "TrainBatches", "evaluation_batches", "train_iterator"),
    "sources": ("Source", "parse_source", "read_documents"),
    "tokenizer": ("SpecialIds", "Tokenizer", "load_tokenizer"),
    "tokenizer_training": ("TokenizerConfig", "train_tokenizer"),
}
_FILE_OF = {name: file for file, names in _HOME.items() for name in names}

__all__ = [
    "BatchIterator",
    "CausalData",
    "CausalEvaluationRows",
    "CausalRows",
    "DataConfig",
    "DataError",
    "DataSplit",
    "Documents",
    "Packing",
    "Rows",
    "Source",
    "SpecialIds",
    "TokenCorpus",
    "Tokenizer",
    "TokenizerConfig",
    "TrainBatches",
    "build_corpus",
    "byte_pair_table",
    "default_cache_dir",
    "evaluation_batches",
    "load_documents",
    "load_tokenizer",
    "merge_byte_pairs",
    "open_corpus",
    "parse_source",
    "read_documents",
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
