"""Conversion from and to the Hugging Face format, shared by the decoders that follow GPT-2.

A family defines its `GPTForm`: its fields, the names of its modules, and its classes.
"""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from .....data.common.json_text import JsonObject
from ....decoders.gpt.gpt import GPTConfig
from ...config_mapping import Field, HFConfig, none_for_defaults, settings_from_hf
from ...form import Form
from ...tensors.layout import BY_HEAD, BY_HEAD_VECTOR, FROM_HEADS, LINEAR, VECTOR, Layout
from ...tensors.mapping import IgnoredTensor, TensorMapping, TensorRule, embedding, linear, norm

Config = TypeVar("Config", bound=GPTConfig)
CLASSIFIERS = {"sequence_classification": "score", "token_classification": "classifier"}
"""The classification heads and the names of their linear maps."""
DROPOUTS = ("embedding_dropout", "attention_dropout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTForm(Form[Config]):
    """Describes how one family is converted from and to the Hugging Face format."""

    prefix: str
    """Prefix of the names of the body's tensors."""
    tokens: str
    """Name of the token embedding, without the prefix of the body."""
    layers: str
    """Prefix of the tensors of one layer, without the prefix of the body."""
    parts: Mapping[str, str]
    """The name of each module in a layer, such as `self_attn.q_proj` for `attention/query`."""
    joined: str | None = None
    """Name of the linear map that projects to queries, keys and values together, if there is one.
    """
    joined_layouts: tuple[Layout, Layout] = (BY_HEAD, BY_HEAD_VECTOR)
    """Layouts of the kernel and of the bias of the linear map `joined`."""
    layout: Layout = LINEAR
    """How the linear maps of a layer are stored."""
    output_layout: Layout = FROM_HEADS
    """How the output projection of attention is stored."""
    body: Mapping[str, str]
    """The name (without the prefix of the body) of each norm, embedding and linear map outside of
    the layers."""
    output: str = "lm_head"
    """Name of the output projection."""
    ignored: tuple[str, ...] = ()
    """Buffers that older files contain."""
    linear_classifier_bias: bool = True
    """Whether the linear map of token classification has a bias."""

    def config_from_hf(self, hf_config: HFConfig, source: str) -> Config:
        """Converts the content of a `config.json`; see `Form`."""
        fields = dict(hf_config)
        # `own_settings` removes the fields that it reads; the table reads the remaining fields.
        settings = self.read_own_settings(fields, source)
        settings |= settings_from_hf(self.fields, fields, source)
        head = self.read_head(hf_config, settings, source)
        if head != "causal_lm" and self.config.output_bias:
            settings["output_bias"] = False
        defaults = dict.fromkeys(DROPOUTS, settings.get("dropout_rate"))
        none_for_defaults(settings, {**defaults, "d_ff": 4 * settings["d_model"]})
        return self.config(**settings)

    def config_to_hf(self, config: Config) -> JsonObject:
        """Converts a configuration to the content of a `config.json`; see `Form`."""
        # A setting without a field in the family's table must have its default.
        names = {field.flax for field in self.fields.fields if isinstance(field, Field)}
        fixed = {
            "positions": (self.config.__dataclass_fields__["positions"].default,),
            "position_base": (10_000.0,),
            "norm_position": ("pre",),
            "use_bias": (True,),
            "output_bias": (self.config.output_bias, False),
            "local_window": (None,),
            "causal": (True,),
            "num_experts": (0,),
            "scale_scores": (True,),
            "scale_scores_by_layer": (False,),
            "d_ff": () if "d_ff" in names else (None, 4 * config.d_model),
            "embedding_dropout_rate": () if "embedding_dropout" in names else (0.0,),
        }
        explicit = {
            "d_ff": config.feed_forward_dim,
            "embedding_dropout": config.embedding_dropout_rate,
            "attention_dropout": config.attention_dropout_rate,
        }
        head = config.head if config.head in CLASSIFIERS else "causal_lm"
        return self.write_fields(config, head, fixed=fixed, explicit=explicit)

    def parts_of(self, config: Config) -> Mapping[str, str]:
        """Returns the transformers name of each module in a layer."""
        del config
        return self.parts

    def tensor_mapping(self, config: Config) -> TensorMapping:
        """Returns the mapping from the parameters of a model, including its head, to tensors."""
        # The embeddings and maps around the layers, then the layers.
        tokens, layers = self.prefix + self.tokens, self.prefix + self.layers
        rules = [*embedding("token_embedding", tokens)]
        for path, name in self.body.items():
            rules += self._rules(config, path, self.prefix + name)
        if self.joined is not None:
            rules += self._joined(config, f"{layers}.{self.joined}")
        for part, name in self.parts_of(config).items():
            rules += self._rules(config, f"layers/{part}", f"{layers}.{name}")
        # Buffers, the head and the output projection.
        ignored = [IgnoredTensor(self.prefix + name) for name in self.ignored]
        if config.head in CLASSIFIERS:
            name = CLASSIFIERS[config.head]
            bias = config.head == "token_classification" and self.linear_classifier_bias
            rules += linear("head/classifier", name, bias=bias)
        elif config.tie_output:
            ignored.append(IgnoredTensor(f"{self.output}.weight", same_as=f"{tokens}.weight"))
        else:
            rules += embedding("output_embedding", self.output)
        if config.output_bias and config.head not in CLASSIFIERS:
            rules.append(TensorRule(("output_bias",), f"{self.output}.bias", VECTOR))
        return TensorMapping(tuple(rules), tuple(ignored), self.prefix)

    def _joined(self, config: Config, name: str) -> list[TensorRule]:
        """Returns the rules of the linear map that projects to queries, keys and values."""
        three = [f"layers/attention/{part}" for part in ("query", "key", "value")]
        kernel, bias = self.joined_layouts
        rules = [TensorRule(tuple(f"{p}/kernel" for p in three), f"{name}.weight", kernel)]
        if config.attention_bias:
            biases = tuple(f"{p}/bias" for p in three)
            rules.append(TensorRule(biases, f"{name}.bias", bias))
        return rules

    def _rules(self, config: Config, path: str, name: str) -> tuple[TensorRule, ...]:
        """Returns the rules of a module; a norm without parameters has no rules."""
        if path.endswith("norm"):
            return norm(path, name) if config.norm_affine else ()
        if path.endswith("position_embedding"):
            return embedding(path, name)
        if path.endswith("_projection"):
            return linear(path, name, bias=False)
        if path.endswith("attention/output"):
            return linear(path, name, self.output_layout, bias=config.attention_output_bias)
        bias = config.attention_bias if "/attention/" in path else config.use_bias
        return linear(path, name, self.layout, bias=bias)
