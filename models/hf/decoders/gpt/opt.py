"""OPT in the Hugging Face format."""

from .....data.common.json_text import JsonObject
from ....decoders.gpt.opt import OPTConfig
from ...config_mapping import ACTIVATIONS, ConfigMapping, Field, FixedField, Settings, take_field
from ...form import head_classes
from ...generation_config import NAMES
from ...tensors.mapping import TensorMapping
from .gpt_form import GPTForm


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads whether norms precede sublayers, and the width of the embeddings."""
    before = take_field(fields, "do_layer_norm_before", True, source)
    removed = take_field(fields, "_remove_final_layer_norm", False, source)
    width = take_field(fields, "word_embed_proj_dim", None, source, kind=int)
    settings["final_norm"] = not removed
    settings["norm_position"] = "pre" if before else "post"
    settings["d_embedding"] = None if width == fields.get("hidden_size", 768) else width


def _own_fields(config: OPTConfig) -> JsonObject:
    return {
        "_remove_final_layer_norm": not config.final_norm,
        "do_layer_norm_before": config.norm_position == "pre",
        "word_embed_proj_dim": config.d_embedding or config.d_model,
    }


class _OPTForm(GPTForm[OPTConfig]):
    """The conversion of OPT, without rules for tensors that a model lacks."""

    def tensor_mapping(self, config: OPTConfig) -> TensorMapping:
        """Returns the mapping from the parameters of a model, including its head, to tensors."""
        mapping = super().tensor_mapping(config)
        absent = set[str]()
        if config.norm_position == "post" or not (config.norm_affine and config.final_norm):
            absent |= {"final_norm/scale", "final_norm/bias"}
        if config.d_embedding is None:
            absent |= {"embedding_projection/kernel", "output_projection/kernel"}
        rules = tuple(rule for rule in mapping.rules if absent.isdisjoint(rule.flax))
        return TensorMapping(rules, mapping.ignored, mapping.prefix)


FORM = _OPTForm(
    config=OPTConfig,
    model_type="opt",
    classes=head_classes(OPTConfig, "OPT"),
    fields=ConfigMapping(
        (
            Field("vocab_size", "vocab_size", 50_272),
            Field("max_position_embeddings", "max_length", 2048),
            Field("num_hidden_layers", "num_layers", 12),
            Field("hidden_size", "d_model", 768),
            Field("num_attention_heads", "num_heads", 12),
            Field("ffn_dim", "d_ff", 3072),
            Field("activation_function", "activation", "relu", ACTIVATIONS),
            Field("dropout", "dropout_rate", 0.1),
            Field("attention_dropout", "attention_dropout", 0.0),
            Field("enable_bias", "use_bias", True),
            Field("layer_norm_elementwise_affine", "norm_affine", True),
            Field("tie_word_embeddings", "tie_output", True),
            FixedField("layerdrop", (0.0,)),
        ),
        ignored=NAMES | {"activation_dropout", "init_std"},
    ),
    allowed={
        **{"use_bias": (), "norm_affine": (True, False), "norm_position": (), "norm_eps": (1e-5,)},
    },
    prefix="model.",
    tokens="decoder.embed_tokens",
    layers="decoder.layers.{i}",
    parts={
        "attention/query": "self_attn.q_proj",
        "attention/key": "self_attn.k_proj",
        "attention/value": "self_attn.v_proj",
        "attention/output": "self_attn.out_proj",
        "feed_forward/up": "fc1",
        "feed_forward/down": "fc2",
        "attention_norm": "self_attn_layer_norm",
        "feed_forward_norm": "final_layer_norm",
    },
    body={
        "position_embedding": "decoder.embed_positions",
        "embedding_projection": "decoder.project_in",
        "output_projection": "decoder.project_out",
        "final_norm": "decoder.final_layer_norm",
    },
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
)
MAPPING = FORM.mapping()
