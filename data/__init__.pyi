"""From text to batches of numpy arrays.

A ``DataConfig`` (``CausalLMData``, ``PretrainingData``, ``SequenceClassificationData``,
``TokenClassificationData``, ``QuestionAnsweringData``, ``MultipleChoiceData``,
``TranslationData``) reads its source; ``train_tokenizer`` or ``load_tokenizer`` gives the
vocabulary; each split of the config is an ``ExampleSource``, of which ``train_iterator`` makes
batches. Every name is imported on first use, so ``import flaxzoo.data`` costs nothing.
"""

from .batching import BatchIterator as BatchIterator
from .batching import TrainBatches as TrainBatches
from .batching import evaluation_batches as evaluation_batches
from .batching import train_iterator as train_iterator
from .chat.encoding import EncodedChat as EncodedChat
from .chat.encoding import encode_chat as encode_chat
from .chat.encoding import encode_completion as encode_completion
from .chat.policy import PolicyData as PolicyData
from .chat.policy import PolicyExamples as PolicyExamples
from .chat.preference_pairs import DPOData as DPOData
from .chat.preference_pairs import PairExamples as PairExamples
from .chat.preference_pairs import RewardData as RewardData
from .chat.records import Dialogue as Dialogue
from .chat.records import Preference as Preference
from .chat.records import PromptedText as PromptedText
from .chat.records import demonstration as demonstration
from .chat.records import preferences as preferences
from .chat.supervised import SupervisedData as SupervisedData
from .chat.supervised import SupervisedExamples as SupervisedExamples
from .chat_templates.chat_template import ChatTemplate as ChatTemplate
from .chat_templates.chat_template import RenderedChat as RenderedChat
from .common.errors import DataError as DataError
from .common.errors import UserError as UserError
from .common.files import default_cache_dir as default_cache_dir
from .common.files import read_lines as read_lines
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
from .dataset import ExampleSource as ExampleSource
from .dataset import Values as Values
from .embedding.embedding_data import EmbeddingData as EmbeddingData
from .embedding.embedding_examples import EmbeddingExamples as EmbeddingExamples
from .embedding.rerank_data import RerankData as RerankData
from .embedding.rerank_data import RerankExamples as RerankExamples
from .features.masking import Masking as Masking
from .features.segment_pairs import Segments as Segments
from .filters.selection import Selector as Selector
from .packing.packing import Packing as Packing
from .prepared.read_shards import PreparedExamples as PreparedExamples
from .prepared.write_shards import prepare as prepare
from .prompts.examples import PromptExample as PromptExample
from .prompts.examples import prompt_examples as prompt_examples
from .prompts.few_shot import FewShot as FewShot
from .prompts.pattern import PATTERNS as PATTERNS
from .prompts.pattern import PromptPattern as PromptPattern
from .prompts.pattern import pattern_for as pattern_for
from .prompts.pattern import prompt_pattern as prompt_pattern
from .sources.builtin.patterns import Patterns as Patterns
from .sources.builtin.spelled_numbers import NumberWords as NumberWords
from .sources.builtin.spelled_numbers import spell as spell
from .sources.documents import Documents as Documents
from .sources.documents import SourceLike as SourceLike
from .sources.in_memory import Examples as Examples
from .sources.load_documents import load_documents as load_documents
from .sources.load_documents import load_whole as load_whole
from .sources.parallel_corpus import ParallelText as ParallelText
from .sources.parallel_corpus import open_parallel as open_parallel
from .sources.read_documents import read_documents as read_documents
from .sources.retrieval.collection import RetrievalData as RetrievalData
from .sources.retrieval.collection import read_retrieval as read_retrieval
from .sources.retrieval.documents import read_named_texts as read_named_texts
from .sources.sentence_pairs import SentencePair as SentencePair
from .sources.source_names import Source as Source
from .sources.source_names import parse_source as parse_source
from .sources.source_names import parse_sources as parse_sources
from .tasks.base import DataConfig as DataConfig
from .tasks.bert_pretraining import PretrainingData as PretrainingData
from .tasks.bert_pretraining import PretrainingExamples as PretrainingExamples
from .tasks.causal_lm import CausalLMData as CausalLMData
from .tasks.causal_lm import CausalLMEvaluationExamples as CausalLMEvaluationExamples
from .tasks.causal_lm import CausalLMExamples as CausalLMExamples
from .tasks.causal_lm import PatternExamples as PatternExamples
from .tasks.denoising import DenoisingData as DenoisingData
from .tasks.denoising import DenoisingExamples as DenoisingExamples
from .tasks.multiple_choice import MultipleChoiceData as MultipleChoiceData
from .tasks.multiple_choice import MultipleChoiceExamples as MultipleChoiceExamples
from .tasks.question_answering import QuestionAnsweringData as QuestionAnsweringData
from .tasks.question_answering import QuestionAnsweringExamples as QuestionAnsweringExamples
from .tasks.sequence_classification import SequenceClassificationData as SequenceClassificationData
from .tasks.sequence_classification import (
    SequenceClassificationExamples as SequenceClassificationExamples,
)
from .tasks.span_corruption import SpanCorruptionData as SpanCorruptionData
from .tasks.span_corruption import SpanCorruptionExamples as SpanCorruptionExamples
from .tasks.token_classification import TokenClassificationData as TokenClassificationData
from .tasks.token_classification import TokenClassificationExamples as TokenClassificationExamples
from .tasks.translation import NumberExamples as NumberExamples
from .tasks.translation import TextToTextData as TextToTextData
from .tasks.translation import TranslationData as TranslationData
from .tasks.translation import TranslationExamples as TranslationExamples
from .tasks.translation import encode_source as encode_source
from .tasks.translation import start_and_end as start_and_end
from .tokenizers.base import SpecialIds as SpecialIds
from .tokenizers.base import Tokenizer as Tokenizer
from .tokenizers.load import load_tokenizer as load_tokenizer
from .tokenizers.subwords import MergeRound as MergeRound
from .tokenizers.subwords import fewest_pieces as fewest_pieces
from .tokenizers.subwords import merge_byte_pairs as merge_byte_pairs
from .tokenizers.training import TokenizerConfig as TokenizerConfig
from .tokenizers.training import train_tokenizer as train_tokenizer
