"""Model families, generation and conversion of weights: functions of (parameters, arrays).

Example::

    config = models.preset("gpt2")
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    logits = model.apply({"params": params}, input_ids=ids).logits
"""

from .adapters.lora import LoRA as LoRA
from .adapters.lora import LoRAConfig as LoRAConfig
from .adapters.lora import make_lora as make_lora
from .adapters.peft_export import save_adapter as save_adapter
from .config import Execution as Execution
from .config import TransformerConfig as TransformerConfig
from .decoders.gpt.gpt import GPT as GPT
from .decoders.gpt.gpt import GPTConfig as GPTConfig
from .decoding.generator import Generator as Generator
from .decoding.request import GenerationRequest as GenerationRequest
from .decoding.request import Hypothesis as Hypothesis
from .decoding.request import Sampling as Sampling
from .decoding.speculative import Draft as Draft
from .decoding.unstack_layers import unstack_layers as unstack_layers
from .encoder_decoders.transformer import EncoderDecoder as EncoderDecoder
from .encoder_decoders.transformer import EncoderDecoderConfig as EncoderDecoderConfig
from .encoders.bert import BERT as BERT
from .encoders.bert import BertConfig as BertConfig
from .hf.cross_encoder import PairScoring as PairScoring
from .hf.generate import generate as generate
from .hf.generation_config import generation_arguments as generation_arguments
from .hf.save import save as save
from .hf.sentence_embedding import EmbeddingSettings as EmbeddingSettings
from .hf.sparse_encoder import SparseSettings as SparseSettings
from .init import init_params as init_params
from .lectures.lecture_bert import LectureBertConfig as LectureBertConfig
from .lectures.lecture_gpt import LectureGPTConfig as LectureGPTConfig
from .lectures.lecture_transformer import LectureTransformerConfig as LectureTransformerConfig
from .lectures.parameter_free_attention import kernel_regression as kernel_regression
from .lectures.parameter_free_attention import kernel_weights as kernel_weights
from .lectures.parameter_free_attention import similarity_attention as similarity_attention
from .lectures.parameter_free_attention import similarity_weights as similarity_weights
from .lectures.parameter_free_attention import simple_attention as simple_attention
from .lectures.parameter_free_attention import simple_attention_weights as simple_attention_weights
from .lectures.positions import binary_positions as binary_positions
from .lectures.vectors import apply_to_vectors as apply_to_vectors
from .loading import load as load
from .nn.cache import Cache as Cache
from .nn.cache import init_cache as init_cache
from .nn.dropout import row_keys as row_keys
from .nn.pooling import mean_pool as mean_pool
from .nn.positions import sinusoidal_positions as sinusoidal_positions
from .nn.relative_positions import relative_buckets as relative_buckets
from .registry import Preset as Preset
from .registry import config_from_dict as config_from_dict
from .registry import config_to_dict as config_to_dict
from .registry import create as create
from .registry import preset as preset
from .registry import presets as presets
from .text.attend import Attention as Attention
from .text.attend import TextAttention as TextAttention
from .text.attend import draw_attention as draw_attention
from .text.chat.conversation import Conversation as Conversation
from .text.chat.conversation import Turn as Turn
from .text.chat.tools.arithmetic import arithmetic as arithmetic
from .text.chat.tools.database import query_database as query_database
from .text.chat.tools.python_program import Limits as Limits
from .text.chat.tools.python_program import python_program as python_program
from .text.chat.tools.search_files import search_files as search_files
from .text.chat.tools.tool import Tool as Tool
from .text.chat.tools.tool import ToolCall as ToolCall
from .text.completions import Completed as Completed
from .text.completions import Completion as Completion
from .text.completions import Prompt as Prompt
from .text.completions import completed_to_json as completed_to_json
from .text.completions import read_prompts as read_prompts
from .text.embed import TextEmbedder as TextEmbedder
from .text.fill_mask import MaskFiller as MaskFiller
from .text.generate import TextGenerator as TextGenerator
from .text.pair_scorer import PairScorer as PairScorer
from .text.pair_scorer import RankedDocument as RankedDocument
from .text.prompting.answer import Answer as Answer
from .text.prompting.answer import answer_queries as answer_queries
from .text.prompting.continuations import ContinuationScore as ContinuationScore
from .text.prompting.continuations import ContinuationScorer as ContinuationScorer
from .text.prompting.few_shot import FewShotAccuracy as FewShotAccuracy
from .text.prompting.few_shot import few_shot_accuracy as few_shot_accuracy
from .text.prompting.harness import evaluate_tasks as evaluate_tasks
from .text.prompting.harness import harness_model as harness_model
from .text.score import NextToken as NextToken
from .text.score import NextWord as NextWord
from .text.score import TextScore as TextScore
from .text.score import TextScorer as TextScorer
from .text.score import TokenScore as TokenScore
from .text.sparse_embed import SparseEmbedder as SparseEmbedder
from .text.translate import TextTranslator as TextTranslator
from .text.translate import Translation as Translation
from .text.yes_no_scorer import YesNoPrompt as YesNoPrompt
from .text.yes_no_scorer import YesNoScorer as YesNoScorer
