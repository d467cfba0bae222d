"""What a model is: pure functions of (parameters, arrays).

Example::

    config = models.preset("gpt2")
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    logits = model.apply({"params": params}, input_ids=ids).logits
"""

from .attention import Cache, init_cache
from .beam import BeamSearch, Hypothesis, Searcher, Translator
from .bert import BERT, BertConfig
from .config import (
    Execution,
    Preset,
    TransformerConfig,
    config_from_dict,
    config_to_dict,
    create,
    preset,
    presets,
)
from .decoding_layout import separate_layers
from .dropout import row_keys
from .generating import generate
from .generation import Generator, Sampling
from .gpt import GPT, GPTConfig
from .heads import mean_pool
from .layers import sinusoidal_positions
from .loading import load
from .shapes import init_params
from .transformer import EncoderDecoder, EncoderDecoderConfig
from .weights.generation import generation_arguments

__all__ = [
    "BERT",
    "GPT",
    "BeamSearch",
    "BertConfig",
    "Cache",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Execution",
    "GPTConfig",
    "Generator",
    "Hypothesis",
    "Preset",
    "Sampling",
    "Searcher",
    "TransformerConfig",
    "Translator",
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
    "separate_layers",
    "sinusoidal_positions",
]
