"""Model families, generation and conversion of weights: functions of (parameters, arrays).

Example::

    config = models.preset("gpt2")
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    logits = model.apply({"params": params}, input_ids=ids).logits
"""

from .bert import BERT, BertConfig
from .config import Execution, TransformerConfig
from .decoding.generator import Generator
from .decoding.request import BeamSearch, GenerationRequest, Hypothesis, Sampling
from .decoding.unstack_layers import unstack_layers
from .gpt import GPT, GPTConfig
from .hf.generate import generate
from .hf.generation_config import generation_arguments
from .hf.save import save
from .hf.sentence_embedding import EmbeddingSettings
from .init import init_params
from .load import load
from .nn.cache import Cache, init_cache
from .nn.layers import row_keys
from .nn.pooling import mean_pool
from .nn.positions import sinusoidal_positions
from .registry import Preset, config_from_dict, config_to_dict, create, preset, presets
from .transformer import EncoderDecoder, EncoderDecoderConfig

__all__ = [
    "BERT",
    "GPT",
    "BeamSearch",
    "BertConfig",
    "Cache",
    "EmbeddingSettings",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Execution",
    "GPTConfig",
    "GenerationRequest",
    "Generator",
    "Hypothesis",
    "Preset",
    "Sampling",
    "TransformerConfig",
    "config_from_dict",
    "config_to_dict",
    "create",
    "generate",
    "generation_arguments",
    "init_cache",
    "init_params",
    "load",
    "mean_pool",
    "preset",
    "presets",
    "row_keys",
    "save",
    "sinusoidal_positions",
    "unstack_layers",
]
