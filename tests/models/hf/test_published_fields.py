"""Fields of `config.json` files as they are published, and of files that state every field."""

import json

import pytest
import transformers
from flaxzoo.models.hf.config_mapping import UNUSED
from flaxzoo.models.hf.registry import mapping_of_type
from flaxzoo.models.hf.tensors.mapping import WeightsError

FAMILIES = (
    *("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3Text"),
    *("Olmo2", "SmolLM3", "Granite", "StableLm", "Falcon", "Olmo3"),
    *("Phi3", "GPTNeo", "GPTJ", "GPTNeoX", "OPT", "Bloom", "GPT2", "OpenAIGPT"),
    *(
        "T5",
        "MT5",
        "Bart",
        "MBart",
        "Marian",
        "Pegasus",
        "Bert",
        "Roberta",
        "DistilBert",
        "Electra",
        "XLMRoberta",
        "Camembert",
        "RobertaPreLayerNorm",
        "MPNet",
        "ModernBert",
        "Deberta",
        "DebertaV2",
        "Albert",
        "NomicBert",
        "Gte",
    ),
)
OF_VERSION_4 = {
    **{name: values[0] for name, values in UNUSED.items()},
    **{"bad_words_ids": None, "chunk_size_feed_forward": 0, "torchscript": False, "max_length": 20},
    **{"tf_legacy_loss": False, "use_bfloat16": False, "num_beam_groups": 1, "typical_p": 1.0},
}
"""Fields that every configuration of transformers 4 had, with their defaults."""
OF_CROSS_ENCODERS = {
    "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
}
"""Fields of sentence-transformers, which change no logits."""


def config_of(fields):
    return mapping_of_type(fields["model_type"], "config.json").config_from_hf(
        fields, "config.json"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_may_state_every_field_or_none(family):
    """As `to_dict` and `to_json_file(use_diff=False)` write them; defaults in place of none."""
    theirs = getattr(transformers, f"{family}Config")()
    stated = json.loads(json.dumps(theirs.to_dict()))
    found = config_of(stated)
    assert config_of(OF_VERSION_4 | OF_CROSS_ENCODERS | stated) == found
    assert config_of({"model_type": theirs.model_type}) == found, "other defaults"


@pytest.mark.parametrize(
    ("name", "value"),
    [("pruned_heads", {"0": [1]}), ("add_cross_attention", True), ("tie_encoder_decoder", True)],
)
def test_a_field_of_all_families_is_refused_where_it_would_change_something(name, value):
    with pytest.raises(WeightsError, match=rf"{name} .*not supported"):
        config_of({"model_type": "llama", name: value})


PUBLISHED = {
    "huggyllama/llama-7b": {"model_type": "llama", "max_sequence_length": 2048},
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        **{"model_type": "llama", "is_llama_config": True, "rope_interleaved": False},
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
    },
    "unsloth/Llama-3.2-1B": {"model_type": "llama", "unsloth_fixed": True},
    "Qwen/Qwen2.5-0.5B": {"model_type": "qwen2", "use_mrope": False},
    "google/gemma-2-9b": {"model_type": "gemma2", "sliding_window_size": 4096},
    "microsoft/Phi-4-mini-instruct": {
        **{"model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "mlp_bias": False},
        **{"lm_head_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
    },
    "google-t5/t5-11b": {"model_type": "t5", "architectures": ["T5WithLMHeadModel"]},
    "sshleifer/distilbart-cnn-12-6": {
        **{"model_type": "bart", "save_step": 58, "replacing_rate": 0},
        **{"student_decoder_layers": None, "student_encoder_layers": None},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_files_say_besides_changes_nothing(name):
    fields = PUBLISHED[name]
    assert config_of(fields) == config_of({"model_type": fields["model_type"]})


def test_a_model_with_yarn_may_be_one_that_was_trained_further():
    scaling = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
    plain, further = (
        config_of({"model_type": "llama", "rope_scaling": {**scaling, **more}})
        for more in ({}, {"finetuned": True})
    )
    assert plain == further


AUTHORS = {
    "nomic_bert": (
        {
            **{"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 64},
            **{"activation_function": "swiglu", "rotary_emb_base": 500, "prenorm": False},
            **{"layer_norm_epsilon": 1e-6, "rotary_emb_fraction": 1.0, "summary_type": "cls_index"},
            **{"rotary_emb_scale_base": None, "rotary_scaling_factor": None, "resid_pdrop": 0.1},
            **{"max_trained_positions": 32, "qkv_proj_bias": False},
        },
        {
            **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"intermediate_size": 96, "max_position_embeddings": 64, "layer_norm_eps": 1e-6},
            **{"hidden_dropout_prob": 0.1, "rope_parameters": {"rope_theta": 500}},
        },
    ),
    "gte": (
        {
            **{"model_type": "new", "architectures": ["NewForMaskedLM"], "rope_theta": 20_000},
            **{"rope_scaling": {"type": "ntk", "factor": 8.0}, "position_embedding_type": "rope"},
            **{"hidden_size": 64, "num_attention_heads": 4, "pack_qkv": True},
            **{
                "logn_attention_scale": False,
                "unpad_inputs": False,
                "layer_norm_type": "layer_norm",
            },
        },
        {
            **{"architectures": ["GteForMaskedLM"], "hidden_size": 64, "num_attention_heads": 4},
            "rope_parameters": {
                **{"rope_type": "linear", "rope_theta": 160_000.0, "factor": 8.0 ** (2 / 16)},
            },
        },
    ),
}


@pytest.mark.parametrize("model_type", AUTHORS)
def test_the_authors_fields_are_those_of_transformers(model_type):
    authors, theirs = ({"model_type": model_type, **fields} for fields in AUTHORS[model_type])
    found = config_of(authors)
    assert found == config_of(theirs)
    assert config_of(theirs | authors) == found, "both forms"


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "nomic_bert", "prenorm": True},
        {"model_type": "nomic_bert", "rotary_emb_fraction": 0.5},
        {"model_type": "nomic_bert", "activation_function": "glu"},
        {"model_type": "nomic_bert", "head_dim": 32},
        {"model_type": "new", "logn_attention_scale": True},
        {"model_type": "new", "rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}},
    ],
    ids=lambda fields: list(fields)[-1],
)
def test_other_networks_of_the_authors_are_refused(fields):
    name = list(fields)[-1].replace("activation_function", "hidden_act")
    with pytest.raises(WeightsError, match=rf"{name}.*not supported"):
        config_of(fields)


def test_scaled_frequencies_begin_at_the_trained_length():
    """As in nomic-embed-text-v1."""
    fields = {"rotary_scaling_factor": 2, "max_trained_positions": 32, "n_positions": 64}
    found = config_of({"model_type": "nomic_bert", **fields})
    scaling = {"rope_type": "dynamic", "rope_theta": 1000, "factor": 2}
    plain = {"model_type": "nomic_bert", "max_position_embeddings": 32, "rope_parameters": scaling}
    assert found == config_of(plain)


def test_the_summary_of_electra_matters_only_for_choices():
    fields = {"model_type": "electra", "summary_type": "mean", "summary_activation": None}
    usual = {"model_type": "electra", "architectures": ["ElectraForSequenceClassification"]}
    assert config_of(fields | usual) == config_of(usual)
    with pytest.raises(WeightsError, match=r"summary_type 'mean'"):
        config_of(fields | {"architectures": ["ElectraForMultipleChoice"]})
