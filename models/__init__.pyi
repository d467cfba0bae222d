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
from .decoding.request import BeamSearch as BeamSearch
from .decoding.request import GenerationRequest as GenerationRequest
from .decoding.request import Hypothesis as Hypothesis
from .decoding.request import Sampling as Sampling
from .decoding.speculative import Draft as Draft
from .decoding.unstack_layers import unstack_layers as unstack_layers
from .encoder_decoders.transformer import EncoderDecoder as EncoderDecoder
from .encoder_decoders.transformer import EncoderDecoderConfig as EncoderDecoderConfig
from .encoders.bert import BERT as BERT
from .encoders.bert import BertConfig as BertConfig
from .hf.generate import generate as generate
from .hf.generation_config import generation_arguments as generation_arguments
from .hf.save import save as save
from .hf.sentence_embedding import EmbeddingSettings as EmbeddingSettings
from .init import init_params as init_params
from .loading import load as load
from .nn.cache import Cache as Cache
from .nn.cache import init_cache as init_cache
from .nn.dropout import row_keys as row_keys
from .nn.pooling import mean_pool as mean_pool
from .nn.positions import binary_positions as binary_positions
from .nn.positions import sinusoidal_positions as sinusoidal_positions
from .nn.relative_positions import relative_buckets as relative_buckets
from .parameter_free_attention import kernel_regression as kernel_regression
from .parameter_free_attention import kernel_weights as kernel_weights
from .parameter_free_attention import simple_attention as simple_attention
from .parameter_free_attention import simple_attention_weights as simple_attention_weights
from .registry import Preset as Preset
from .registry import config_from_dict as config_from_dict
from .registry import config_to_dict as config_to_dict
from .registry import create as create
from .registry import preset as preset
from .registry import presets as presets
