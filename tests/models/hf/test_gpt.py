"""Which configurations of OpenAI GPT and GPT-2 are understood, and which are refused by name."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import transformers
from flaxzoo import models
from flaxzoo.models.hf.decoders.gpt.gpt import MAPPING
from flaxzoo.models.hf.tensors.mapping import WeightsError
from safetensors.numpy import load_file, save_file

# As published with the weights.
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
OPENAI = {
    "afn": "gelu",
    "architectures": ["OpenAIGPTLMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "openai-gpt",
    "n_ctx": 512,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 512,
    "n_special": 0,
    "predict_special_tokens": True,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "vocab_size": 40478,
}


@pytest.mark.parametrize(("name", "fields"), [("gpt", OPENAI), ("gpt2", GPT2)])
def test_published_configurations_are_the_presets(name, fields):
    expected = models.preset(name)
    assert MAPPING.config_from_hf(fields, "here") == expected
    bare = {"model_type": fields["model_type"]}  # everything else is their library's default
    assert MAPPING.config_from_hf(bare, "here") == expected
    assert MAPPING.config_from_hf(MAPPING.config_to_hf(models.preset(name)), "here") == expected


@pytest.mark.parametrize(("name", "fields"), [("gpt", OPENAI), ("gpt2", GPT2)])
def test_other_names_and_fields_of_searches(name, fields):
    aliases = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    }
    renamed = {aliases.get(field, field): value for field, value in fields.items()}
    searched = {"max_length": 20, "do_sample": False, "num_beams": 1, "temperature": 1.0}
    expected = models.preset(name)
    assert MAPPING.config_from_hf(renamed | searched, "here") == expected
    smaller = renamed | {"num_hidden_layers": 3}
    assert MAPPING.config_from_hf(smaller, "here") == dataclasses.replace(expected, num_layers=3)
    assert MAPPING.config_from_hf(fields | {"num_hidden_layers": None}, "here") == expected
    message = "here: num_hidden_layers 3 .*n_layer, .*12"
    with pytest.raises(WeightsError, match=message):
        MAPPING.config_from_hf(fields | {"num_hidden_layers": 3}, "here")


@pytest.mark.parametrize("name", ["gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_a_preset_is_written(name):
    config = models.preset(name)
    assert MAPPING.config_from_hf(MAPPING.config_to_hf(config), "here") == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**GPT2, "architectures": ["GPT2DoubleHeadsModel"]}, "here: .*GPT2DoubleHeadsModel"),
        (
            {**OPENAI, "architectures": ["OpenAIGPTDoubleHeadsModel"]},
            "here: .*OpenAIGPTDoubleHeadsModel .*OpenAI",
        ),
        ({**GPT2, "add_cross_attention": True}, "here: add_cross_attention True"),
        ({**GPT2, "activation_function": "mish"}, "here: activation_function 'mish'"),
        ({**OPENAI, "afn": "gelu_fast"}, "here: afn 'gelu_fast' .*'gelu',"),
        ({**OPENAI, "n_inner": 100}, "fields: n_inner"),
        ({**GPT2, "rotary_dim": 8}, "fields: rotary_dim"),
    ],
)
def test_refused_by_name(fields, message):
    with pytest.raises(WeightsError, match=message):
        MAPPING.config_from_hf(fields, "here")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt3-small", {}, "gpt2 .*local_window 256: .*None"),
        ("gpt2", {"positions": "sinusoidal"}, "gpt2 .*positions 'sinusoidal': .*'learned'"),
        ("gpt2", {"positions": "relative"}, "gpt2 .*positions 'relative': .*'learned'"),
        ("gpt2", {"positions_at": "queries_keys"}, "gpt2 .*positions_at 'queries_keys'"),
        ("gpt2", {"use_bias": False}, "gpt2 .*use_bias False: .*True"),
        ("gpt", {"d_ff": 100}, "openai-gpt .*d_ff 100: .*None, 3072"),
        ("gpt", {"activation": "gelu"}, "openai-gpt .*activation 'gelu': .*'gelu_tanh',"),
        ("gpt2", {"head_convolution": 3}, "gpt2 .*head_convolution 3: .*None"),
        ("gpt2", {"norm_affine": False}, "gpt2 .*norm_affine False: .*True"),
        ("gpt2", {"residual_scalar": True}, "gpt2 .*residual_scalar True: .*False"),
        ("gpt2", {"add_residual": False}, "gpt2 .*add_residual False: .*True"),
        ("gpt2", {"output_bias": True}, "gpt2 .*output_bias True: .*False"),
        ("gpt2", {"causal": False}, "gpt2 .*causal False: .*True"),
        ("gpt2", {"d_v": 32}, "gpt2 .*d_v 32: .*None, 64"),
        ("gpt", {"activation": "relu_squared"}, "openai-gpt .*activation 'relu_squared'"),
        ("gpt", {"scale_scores": False}, "openai-gpt .*scale_scores False: .*True"),
    ],
)
def test_variants_that_transformers_lacks_are_refused(name, changes, message):
    config = models.LectureGPTConfig(**vars(models.preset(name)) | changes)
    with pytest.raises(WeightsError, match=message):
        MAPPING.config_to_hf(config)


@pytest.mark.parametrize(("family", "tokens"), [("GPT2", "wte"), ("OpenAIGPT", "tokens_embed")])
def test_older_files_without_a_prefix_and_with_buffers_are_the_same_model(family, tokens, tmp_path):
    sizes = {"vocab_size": 31, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = getattr(transformers, f"{family}Config")(**sizes)
    getattr(transformers, f"{family}LMHeadModel")(config).save_pretrained(tmp_path)
    model, params = models.load(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(file).items()}
    for i in range(2):
        tensors[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 16, 16), bool))
        tensors[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    tensors["lm_head.weight"] = tensors[f"{tokens}.weight"].copy()
    save_file(tensors, file)
    config = tmp_path / "config.json"
    older = {"n_ctx": 16, "n_special": 0, "predict_special_tokens": True, "output_past": True}
    config.write_text(json.dumps({**json.loads(config.read_text()), **older}))
    again, same = models.load(tmp_path)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, same, params)


def test_a_classifier_reads_one_sequence_per_row(tiny):
    model = tiny(head="sequence_classification", labels=("a", "b"))
    ids = np.ones((3, 7), np.int32)
    for inputs in (
        {"segment_ids": ids},
        {"attention_mask": np.ones((3, 7, 7), bool)},
        {"cache": models.init_cache(model.config, model.model.execution, 3, 8)},
    ):
        with pytest.raises(ValueError, match=r"sequence_classification.* one sequence"):
            model(input_ids=ids, **inputs)


def test_labels_are_checked():
    config = models.preset("gpt2")
    with pytest.raises(ValueError, match=r"'sequence_classification' .*labels"):
        config.with_head("sequence_classification", ())
    with pytest.raises(ValueError, match=r"'masked_lm' .*causal_lm"):
        config.with_head("masked_lm", ())
    assert config.with_head("causal_lm", ()) == config
