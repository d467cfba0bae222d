"""Conversion from and to the Hugging Face format, shared by BART, mBART, Marian and Pegasus.

A family defines its `BartForm`: its fields and classes, its kind of positions, and the placement of
its norms. In transformers 5 an mBART differs from a BART, and a Pegasus from a Marian, only in its
norms.
"""

import dataclasses
import functools
from typing import Generic, TypeVar

import numpy as np

from ....data.common.json_text import JsonObject
from ...encoder_decoders.transformer import EncoderDecoderConfig
from ...heads.specs import HEADS
from ...nn.positions import sinusoidal_positions
from ..config_mapping import (
    ACTIVATIONS,
    Field,
    FixedField,
    HFConfig,
    Settings,
    settings_from_hf,
    typed_field,
)
from ..form import Form
from ..generation_config import NAMES
from ..tensors.layout import ROW
from ..tensors.mapping import (
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    embedding,
    layer_rules,
    linear,
    lm_head,
    norm,
)

Config = TypeVar("Config", bound=EncoderDecoderConfig)

SIZES = (
    Field("d_model", "d_model", 1024),
    Field("max_position_embeddings", "max_length", 1024),
    Field("encoder_layers", "num_layers", 12),
    Field("encoder_attention_heads", "num_heads", 16),
    Field("encoder_ffn_dim", "d_ff", 4096),
    Field("decoder_layers", "num_decoder_layers", 12),
    Field("decoder_attention_heads", "decoder_num_heads", 16),
    Field("decoder_ffn_dim", "decoder_d_ff", 4096),
    Field("activation_function", "activation", "gelu", ACTIVATIONS),
    Field("scale_embedding", "scale_embedding", False),
    Field("dropout", "dropout_rate", 0.1),
    Field("attention_dropout", "attention_dropout_rate", 0.0),
    Field("activation_dropout", "activation_dropout_rate", 0.0),
    # Layer dropout affects only training, but fine-tuning in flaxzoo would not apply layer dropout.
    FixedField("encoder_layerdrop", (0.0,)),
    FixedField("decoder_layerdrop", (0.0,)),
    FixedField("is_encoder_decoder", (True,)),
    FixedField("is_decoder", (False,)),
    FixedField("do_blenderbot_90_layernorm", (False,)),
)
# In transformers, logits always have a bias, and `classif_dropout` is obsolete.
IGNORED = NAMES | {"add_bias_logits", "extra_pos_embeddings", "classif_dropout", "init_std"}
ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}

PREFIX = "model."
# The modules of a layer: the path in flaxzoo, and the name in transformers.
LAYER = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "feed_forward/up": "fc1",
    "feed_forward/down": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
CROSS = {
    "cross_attention/query": "encoder_attn.q_proj",
    "cross_attention/key": "encoder_attn.k_proj",
    "cross_attention/value": "encoder_attn.v_proj",
    "cross_attention/output": "encoder_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
}
STACKS = {"encoder": LAYER, "decoder": LAYER | CROSS}
TABLES = ("decoder.embed_tokens", "encoder.embed_tokens")
# Before transformers 5, the source and target embeddings could be shared without tying the output.
SEPARATE_NAMES = tuple((name, "shared") for name in TABLES)
# If tensors are tied, safetensors stores only the tensor whose name is alphabetically first, so
# accept every name.
SHARED_NAMES = (("shared", TABLES[0]), TABLES)
# The modules of heads whose names differ from the names in a BERT: the path in flaxzoo, and the
# name in transformers.
HEAD_MAPS = {
    "sequence_classification": {
        "pooler": "classification_head.dense",
        "head/classifier": "classification_head.out_proj",
    },
}


def type_fields(*, pre_norm: bool, learned_positions: bool) -> tuple[FixedField, ...]:
    """Returns fields of older files, from the time when one class implemented several families."""
    return (
        FixedField("normalize_before", (pre_norm,)),
        FixedField("add_final_layer_norm", (pre_norm,)),
        FixedField("normalize_embedding", (learned_positions,)),
        FixedField("static_position_embeddings", (not learned_positions,)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartForm(Form[Config], Generic[Config]):
    """Describes how one family is converted from and to the Hugging Face format.

    In `classes`, "seq2seq_lm" is the class with logits (and their bias), and "none" is the class
    without logits.
    """

    settings: Settings
    """Settings of the family that its `config.json` does not contain."""
    learned_positions: bool
    """Whether positions are learned and embeddings are normalized. If False, positions are a
    constant table.
    """

    def config_from_hf(self, hf_config: HFConfig, source: str) -> Config:
        """Converts the content of a `config.json`; see `Form`."""
        fields = dict(hf_config)
        own = self.read_own_settings(fields, source)
        settings = settings_from_hf(self.fields, fields, source) | self.settings | own
        # A model with a separate output matrix does not share embeddings.
        settings.setdefault("share_embeddings", True)
        settings["share_embeddings"] &= settings.setdefault("tie_output", True)
        head = self.read_head(fields, settings, source)
        # Heads for labels and answers read the ids of two special tokens, which default to 2.
        if head not in ("none", "seq2seq_lm"):
            settings["head"] = head
            settings["start_id"] = typed_field(fields, "decoder_start_token_id", 2, source)
            settings["end_id"] = typed_field(fields, "eos_token_id", 2, source)
        return self.config(**settings, output_bias=head == "seq2seq_lm")

    def written_head(self, config: Config) -> str:
        """Returns the head of the transformers class of an exported model."""
        without_logits = config.head == "seq2seq_lm" and not config.output_bias
        return "none" if without_logits else config.head

    def config_to_hf(self, config: Config) -> JsonObject:
        """Converts a configuration to the content of a `config.json`; see `Form`.

        The ids of special tokens are left out, because they belong to the tokenizer. Ids that the
        heads for labels and answers need are kept.
        """
        decoder, halves = config.decoder, (config, config.decoder)
        fixed: dict[str, tuple[object, ...]] = {
            "attention_bias": (True,),
            "norm_eps": (1e-5,),
            "encoder_causal": (False,),
            **{name: (value,) for name, value in self.settings.items()},
        }
        # Only Marian has a field that allows a separate source embedding together with a tied
        # output.
        if not config.tie_output:
            fixed["share_embeddings"] = (False,)
        elif self.learned_positions and config.output_bias:
            fixed["share_embeddings"] = (True,)
        if self.learned_positions:
            fixed["source_vocab_size"] = (None, config.vocab_size)
        for name, size in (("d_k", "key_dim"), ("d_v", "value_dim")):
            if any(getattr(half, size) != half.head_dim for half in halves):
                fixed[name] = (None,)
        # Write all sizes of the encoder and the decoder.
        explicit = {
            "d_ff": config.feed_forward_dim,
            "num_decoder_layers": decoder.num_layers,
            "decoder_num_heads": decoder.num_heads,
            "decoder_d_ff": decoder.feed_forward_dim,
        }
        return self.write_fields(config, self.written_head(config), fixed=fixed, explicit=explicit)

    def tensor_mapping(self, config: Config) -> TensorMapping:
        """Returns the mapping from the parameters of a model, including its head, to tensors."""
        prefix = "" if self.written_head(config) == "none" else PREFIX
        shared = f"{prefix}shared"
        source, target = (f"{prefix}{side}.embed_tokens" for side in STACKS)
        # Older files store a version number of the embeddings.
        ignored = [IgnoredTensor(f"{prefix}{side}.version") for side in STACKS]
        # Embeddings: a shared table for source and target, or one table for each.
        if config.share_embeddings:
            tokens, legacy_names = shared, SHARED_NAMES
            rules = [*embedding("token_embedding", shared)]
            ignored += [
                IgnoredTensor(f"{name}.weight", same_as=f"{shared}.weight")
                for name in (source, target)
            ]
        else:
            tokens = target
            legacy_names = () if config.tie_output and config.output_bias else SEPARATE_NAMES
            rules = [*embedding("source_embedding", source), *embedding("token_embedding", target)]
            # Files store a shared table although models with two embeddings never use it.
            zeros = functools.partial(np.zeros, (config.vocab_size, config.d_model), np.float32)
            exported = self.learned_positions
            ignored.append(IgnoredTensor(f"{shared}.weight", value=zeros, exported=exported))
        # The output projection (tied to the target embedding, or separate), or a different head.
        if config.head == "seq2seq_lm":
            output, aliases = lm_head(tokens if config.tie_output else None)
            rules, ignored = rules + output, ignored + aliases
            if config.tie_output:
                last = TABLES[1] if config.share_embeddings else TABLES[0]
                legacy_names = (*legacy_names, (f"{PREFIX}{last}", "lm_head"))
            if config.output_bias:
                rules.append(TensorRule(("output_bias",), "final_logits_bias", ROW))
        else:
            parts = {f"head/{part}": name for part, name in HEADS[config.head].hf_tensors.items()}
            for part, name in HEAD_MAPS.get(config.head, parts).items():
                rules += linear(part, name)
        for side, names in STACKS.items():
            half, half_rules = self._half(config, side, f"{prefix}{side}")
            ignored += half
            rules += half_rules
            rules += layer_rules(f"{side}/layers", f"{prefix}{side}.layers.{{i}}", names)
        return TensorMapping(tuple(rules), tuple(ignored), PREFIX, legacy_names)

    def _half(
        self, config: Config, side: str, name: str
    ) -> tuple[list[IgnoredTensor], list[TensorRule]]:
        """Returns the rules of the tensors of the encoder or the decoder outside of its layers."""
        ignored, rules = list[IgnoredTensor](), list[TensorRule]()
        pre_norm = config.norm_position == "pre"
        if self.learned_positions:
            rules += embedding(f"{side}/position_embedding", f"{name}.embed_positions")
            rules += norm(f"{side}/embedding_norm", f"{name}.layernorm_embedding")
        else:
            # Positions are a constant table, which only Pegasus files must contain.
            positions = functools.partial(
                sinusoidal_positions, config.max_length, config.d_model, layout="halves"
            )
            table = f"{name}.embed_positions.weight"
            ignored.append(IgnoredTensor(table, value=positions, exported=pre_norm, checked=True))
        if pre_norm:
            rules += norm(f"{side}/final_norm", f"{name}.layer_norm")
        return ignored, rules
