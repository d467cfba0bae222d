"""From text to batches of numpy arrays.

The way through: a ``DataConfig`` (``CausalData``, ``PretrainingData``, ``ClassificationData``,
``TaggingData``, ``SpanData``, ``ChoiceData``, ``TranslationData``) reads its source,
``train_tokenizer`` or ``load_tokenizer`` gives the vocabulary, the config's splits are
``Rows``, and ``train_iterator`` makes batches of them. Everything is imported when first
asked for, so ``import flaxzoo.data`` costs nothing.
"""

from .batching import BatchIterator as BatchIterator
from .batching import TrainBatches as TrainBatches
from .batching import evaluation_batches as evaluation_batches
from .batching import train_iterator as train_iterator
from .corpora.pair_corpus import PairCorpus as PairCorpus
from .corpora.pair_corpus import build_pair_corpus as build_pair_corpus
from .corpora.sentence_corpus import SentenceCorpus as SentenceCorpus
from .corpora.sentence_corpus import build_sentence_corpus as build_sentence_corpus
from .corpora.sentence_splitting import split_sentences as split_sentences
from .corpora.token_corpus import TokenCorpus as TokenCorpus
from .corpora.token_corpus import build_corpus as build_corpus
from .corpora.token_corpus import open_corpus as open_corpus
from .dataset import ArraySpec as ArraySpec
from .dataset import DataSplit as DataSplit
from .dataset import Rows as Rows
from .dataset import Values as Values
from .errors import DataError as DataError
from .features.masking import Masking as Masking
from .features.segment_pairs import Segments as Segments
from .io.files import read_lines as read_lines
from .packing.packing import Packing as Packing
from .prepared.read_shards import PreparedRows as PreparedRows
from .prepared.write_shards import prepare as prepare
from .sources.documents import Documents as Documents
from .sources.documents import default_cache_dir as default_cache_dir
from .sources.documents import load_documents as load_documents
from .sources.documents import load_whole as load_whole
from .sources.parallel_corpus import ParallelText as ParallelText
from .sources.parallel_corpus import open_parallel as open_parallel
from .sources.sentence_pairs import Pair as Pair
from .sources.source_names import Source as Source
from .sources.source_names import parse_source as parse_source
from .sources.source_names import parse_sources as parse_sources
from .sources.source_names import read_documents as read_documents
from .sources.spelled_numbers import NumberWords as NumberWords
from .sources.spelled_numbers import spell as spell
from .tasks.base import DataConfig as DataConfig
from .tasks.bert_pretraining import PretrainingData as PretrainingData
from .tasks.bert_pretraining import PretrainingRows as PretrainingRows
from .tasks.causal_lm import CausalData as CausalData
from .tasks.causal_lm import CausalEvaluationRows as CausalEvaluationRows
from .tasks.causal_lm import CausalRows as CausalRows
from .tasks.multiple_choice import ChoiceData as ChoiceData
from .tasks.multiple_choice import ChoiceRows as ChoiceRows
from .tasks.question_answering import SpanData as SpanData
from .tasks.question_answering import SpanRows as SpanRows
from .tasks.sequence_classification import ClassificationData as ClassificationData
from .tasks.sequence_classification import ClassificationRows as ClassificationRows
from .tasks.token_classification import TaggingData as TaggingData
from .tasks.token_classification import TaggingRows as TaggingRows
from .tasks.translation import NumberRows as NumberRows
from .tasks.translation import TranslationData as TranslationData
from .tasks.translation import TranslationRows as TranslationRows
from .tasks.translation import encode_source as encode_source
from .tasks.translation import start_and_end as start_and_end
from .tokenizers.base import SpecialIds as SpecialIds
from .tokenizers.base import Tokenizer as Tokenizer
from .tokenizers.base import load_tokenizer as load_tokenizer
from .tokenizers.bpe_demo import byte_pair_table as byte_pair_table
from .tokenizers.bpe_demo import merge_byte_pairs as merge_byte_pairs
from .tokenizers.export import export_tokenizer as export_tokenizer
from .tokenizers.training import TokenizerConfig as TokenizerConfig
from .tokenizers.training import train_tokenizer as train_tokenizer
