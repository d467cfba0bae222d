"""Tiny random Marian models of transformers, with as few defaults as possible."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flaxzoo.train.losses.cross_entropy import cross_entropy

from .hf_weights import gradients_of

V, P, D = 43, 32, 24
PAD, EOS = V - 1, 0
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "d_model": D,
    "max_position_embeddings": P,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 28,
    "activation_function": "silu",
    "scale_embedding": True,
    "dropout": 0.0,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "decoder_start_token_id": PAD,
    "forced_eos_token_id": None,
}
SHAPES: dict[str, dict[str, Any]] = {
    "shared": {},
    "own source": {
        "share_encoder_decoder_embeddings": False,
        "vocab_size": V + 4,
        "decoder_vocab_size": V,
    },
    "untied": {"tie_word_embeddings": False, "activation_function": "relu"},
    "own source, untied": {
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "vocab_size": V + 4,
        "decoder_vocab_size": V,
        "activation_function": "gelu_new",
    },
    "not scaled": {"scale_embedding": False, "activation_function": "gelu"},
}


def make(
    seed: int = 0,
    noise: float = 0.2,
    eos_bias: float = 0.0,
    name: str = "MarianMTModel",
    **fields: Any,
) -> Any:
    """Make a torch model with no parameter at its initial value."""
    import torch
    import transformers

    torch.manual_seed(seed)
    theirs = getattr(transformers, name)(transformers.MarianConfig(**{**SIZES, **fields}))
    with torch.no_grad():
        for path, parameter in theirs.named_parameters():
            if "embed_positions" not in path:
                parameter.add_(noise * torch.randn_like(parameter))
        if name == "MarianMTModel":
            theirs.final_logits_bias.add_(torch.randn_like(theirs.final_logits_bias))
            theirs.final_logits_bias[0, EOS] += eos_bias
    return theirs.eval()


def both_gradients(theirs: Any, model: Any, params: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """Return flaxzoo's and torch's gradients of the mean loss of some labels, as flaxzoo trees."""
    import torch

    labels = np.random.RandomState(1).randint(0, V, (3, 7))
    theirs.final_logits_bias.requires_grad_()
    inputs = {name: torch.from_numpy(x) for name, x in given.items()}
    theirs(**inputs, labels=torch.from_numpy(labels)).loss.backward()

    def loss(params: Any) -> jax.Array:
        projection = model.apply({"params": params}, **given).projection
        sums = cross_entropy(projection, jnp.asarray(labels), jnp.ones(labels.shape))
        return sums.loss / labels.size

    return jax.jit(jax.grad(loss))(params), gradients_of(theirs, model.config)
