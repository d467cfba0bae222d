"""Tiny random Marian models of transformers, and their weights as ours."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flaxzoo import models
from flaxzoo.models.shapes import parameter_shapes

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
}


def make_pair(seed: int = 0, noise: float = 0.2, eos_bias: float = 0.0, **fields: Any):
    """A torch model with no parameter at its initial value, and our configuration of it."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.MarianConfig(
        **{**SIZES, **fields},
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
        dropout=0.0,
    )
    theirs = transformers.MarianMTModel(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(noise * torch.randn_like(parameter))
        theirs.final_logits_bias.add_(torch.randn_like(theirs.final_logits_bias))
        theirs.final_logits_bias[0, EOS] += eos_bias
    return theirs.eval(), our_config(config)


def our_config(c: Any) -> models.EncoderDecoderConfig:
    shared = c.share_encoder_decoder_embeddings and c.tie_word_embeddings
    return models.EncoderDecoderConfig(
        vocab_size=c.decoder_vocab_size,
        source_vocab_size=None if shared else c.vocab_size,
        max_length=c.max_position_embeddings,
        num_layers=c.encoder_layers,
        num_decoder_layers=c.decoder_layers,
        d_model=c.d_model,
        num_heads=c.encoder_attention_heads,
        decoder_num_heads=c.decoder_attention_heads,
        d_ff=c.encoder_ffn_dim,
        decoder_d_ff=c.decoder_ffn_dim,
        activation={"gelu_new": "gelu_tanh"}.get(c.activation_function, c.activation_function),
        norm_eps=1e-5,
        dropout_rate=c.dropout,
        attention_bias=True,
        position_layout="halves",
        scale_embedding=c.scale_embedding,
        share_embeddings=shared,
        tie_output=c.tie_word_embeddings,
        output_bias=True,
    )


PARTS = {
    "self_attn": "attention",
    "encoder_attn": "cross_attention",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "output",
    "self_attn_layer_norm": "attention_norm",
    "encoder_attn_layer_norm": "cross_attention_norm",
    "final_layer_norm": "feed_forward_norm",
    "fc1": "feed_forward/up",
    "fc2": "feed_forward/down",
}


def parameters(theirs: Any, config: models.EncoderDecoderConfig) -> Any:
    """The parameters of a torch model as our tree."""
    return jax.tree.map(jnp.asarray, converted(theirs.state_dict(), config))


def converted(
    tensors: dict[str, Any], config: models.EncoderDecoderConfig, without: tuple[str, ...] = ()
) -> Any:
    """Torch's parameters, or their gradients, as our tree."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    tree: dict[str, np.ndarray] = {}
    shared = config.share_embeddings
    for name, x in tensors.items():
        x = np.asarray(x)
        words = name.removeprefix("model.").split(".")
        if "layers" in words:
            side, _, layer, *parts, kind = words
            kind = kind if kind == "bias" else "scale" if "norm" in parts[-1] else "kernel"
            path = "/".join([side, "layers", *(PARTS[part] for part in parts), kind])
            stacks.setdefault(path, {})[int(layer)] = x.T if kind == "kernel" else x
        elif name == "final_logits_bias":
            tree["output_bias"] = x[0]
        elif name == "lm_head.weight" and not config.tie_output:
            tree["output_embedding/embedding"] = x
        elif words[:2] == ["decoder", "embed_tokens"] or (shared and words[0] == "shared"):
            tree["token_embedding/embedding"] = x
        elif words[:2] == ["encoder", "embed_tokens"] and not config.share_embeddings:
            tree["source_embedding/embedding"] = x
    tree |= {path: np.stack([own[i] for i in range(len(own))]) for path, own in stacks.items()}
    shapes = parameter_shapes(models.create(config))
    for name in without:
        del shapes[name]

    def place(path: Any, shape: Any) -> np.ndarray:
        return tree.pop("/".join(entry.key for entry in path)).reshape(shape.shape)

    params = jax.tree_util.tree_map_with_path(place, shapes)
    assert not tree, f"not used: {sorted(tree)}"
    return params
