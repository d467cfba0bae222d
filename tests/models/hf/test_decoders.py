"""The decoders of today against transformers: answers, and weights in both directions."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flaxzoo import models
from flaxzoo.models.hf.decoders.causal_decoder import rotary_to_hf
from flaxzoo.models.hf.registry import mapping_of, mapping_of_type
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.hf.tensors.mapping import WeightsError
from flaxzoo.models.nn.rotary import rotary_positions
from flaxzoo.models.rotary_scaling import RotaryScaling

from ...support import later_decoders
from ...support.hf_weights import gradients_of
from ...support.parity import note_answers, note_gradients, note_tokens

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG = {"rope_type": "longrope", "rope_theta": 100.0}
LONG |= {"short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0], "factor": 4.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {}),
    "GPT-2, odd": (
        "GPT2",
        {"n_inner": 37, "layer_norm_epsilon": 0.03, "n_head": 3, "activation_function": "gelu"},
    ),
    "GPT-2, untied": ("GPT2", {"tie_word_embeddings": False, "activation_function": "silu"}),
    "GPT-2, unscaled": ("GPT2", {"scale_attn_weights": False, "activation_function": "relu"}),
    "GPT-2, scaled by layer": (
        "GPT2",
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ),
    "GPT-2, scaled by layer only": (
        "GPT2",
        {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    ),
    "GPT": ("OpenAIGPT", {"layer_norm_epsilon": 0.03, "afn": "relu"}),
    "GPT, untied": ("OpenAIGPT", {"tie_word_embeddings": False, "afn": "swish", "n_head": 3}),
    "Llama, tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "Llama, linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}},
    ),
    "Llama, dynamic, biases": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 2.0},
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 10,
        },
    ),
    "Llama 3.1": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 20,
            },
            "num_key_value_heads": 1,
            "head_dim": 12,
        },
    ),
    "Llama, yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 9,
                "beta_fast": 3.0,
                "beta_slow": 0.2,
            },
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    "Mistral": ("Mistral", {"sliding_window": 4, "head_dim": 10, "num_attention_heads": 6}),
    "Mistral, all tokens": ("Mistral", {"sliding_window": None, "hidden_size": 23, "head_dim": 6}),
    "Qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "Qwen3": ("Qwen3", {"head_dim": 10, "tie_word_embeddings": True, "attention_bias": True}),
    "Qwen3, windows": (
        "Qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "Gemma": ("Gemma", {"head_dim": 10, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    "Gemma2": (
        "Gemma2",
        {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 20},
    ),
    "Gemma2, no caps": (
        "Gemma2",
        {
            "head_dim": 6,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 3,
            "tie_word_embeddings": False,
        },
    ),
    "Gemma3": (
        "Gemma3Text",
        {
            "head_dim": 10,
            "sliding_window": 4,
            "query_pre_attn_scalar": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
    ),
    "Gemma3, capped": (
        "Gemma3Text",
        {
            "head_dim": 6,
            "num_hidden_layers": 7,
            "sliding_window": 3,
            "final_logit_softcapping": 2.0,
            "attn_logit_softcapping": 0.5,  # transformers does not read it
        },
    ),
    "Gemma3, two sides": (
        "Gemma3Text",
        {"head_dim": 10, "sliding_window": 7, "use_bidirectional_attention": True},
    ),
    "Phi3": ("Phi3", {"sliding_window": 5, "hidden_size": 32, "resid_pdrop": 0.1}),
    "Phi3, longrope": (
        "Phi3",
        {
            "hidden_size": 32,
            "original_max_position_embeddings": 8,
            "rope_parameters": {**LONG, "partial_rotary_factor": 0.5},
        },
    ),
    "Mixtral": (
        "Mixtral",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "sliding_window": 4,
        },
    ),
    "Mixtral, one expert a token": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "Qwen3 MoE": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 10,
            "head_dim": 8,
            "norm_topk_prob": True,
        },
    ),
    "Qwen3 MoE, plain weights": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "head_dim": 6,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "GPT-Neo": (
        "GPTNeo",
        {
            "num_layers": 3,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1], [["local"], 1]],
            "window_size": 4,
        },
    ),
    "GPT-Neo, untied": (
        "GPTNeo",
        {
            **{"num_layers": 2, "num_heads": 3, "intermediate_size": None},
            **{"attention_types": [[["global"], 2]], "tie_word_embeddings": False},
        },
    ),
    "GPT-J": ("GPTJ", {"rotary_dim": 4}),
    "GPT-J, tied": ("GPTJ", {"rotary_dim": 6, "n_inner": 20, "tie_word_embeddings": True}),
    "GPT-NeoX": (
        "GPTNeoX",
        {
            "rope_parameters": {
                **{"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
                "partial_rotary_factor": 0.7,
            },
            "intermediate_size": 96,
        },
    ),
    "GPT-NeoX, one after the other": (
        "GPTNeoX",
        {
            **{"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0},
            "tie_word_embeddings": True,
        },
    ),
    "OPT": ("OPT", {"ffn_dim": 20, "enable_bias": False}),
    "OPT, after the sum": (
        "OPT",
        {
            **{"ffn_dim": 20, "do_layer_norm_before": False, "word_embed_proj_dim": 10},
            "tie_word_embeddings": False,
        },
    ),
    "OPT, norms only": ("OPT", {"ffn_dim": 96, "layer_norm_elementwise_affine": False}),
    "OPT, no norm at the end": ("OPT", {"ffn_dim": 20, "_remove_final_layer_norm": True}),
    "BLOOM": ("Bloom", {"n_head": 3}),
    "BLOOM, untied": (
        "Bloom",
        {
            **{"n_head": 6, "tie_word_embeddings": False},
            "apply_residual_connection_post_layernorm": True,
        },
    ),
}
KINDS |= later_decoders.KINDS
CLASS = {
    "Gemma3Text": "Gemma3ForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "OpenAIGPT": "OpenAIGPTLMHeadModel",
}
OTHER_SIZES = {
    "Falcon": ("intermediate_size", "num_key_value_heads"),
    "GPT2": ("intermediate_size", "num_key_value_heads"),
    "OpenAIGPT": ("intermediate_size", "num_key_value_heads"),
    "GPTNeo": ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "GPTJ": ("intermediate_size", "num_key_value_heads"),
    "GPTNeoX": ("num_key_value_heads",),
    "OPT": ("intermediate_size", "num_key_value_heads"),
    "Bloom": ("intermediate_size", "num_key_value_heads", "max_position_embeddings"),
}
"""The sizes that a family lacks, or has under another name."""
FAMILIES = {family for family, _ in KINDS.values()}
OTHER_HEADS = [
    (kind, suffix)
    for kind in (
        *("Llama 3.1", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Mixtral"),
        *("GPT-2", "GPT", "GPT-Neo", "GPT-J", "GPT-NeoX", "OPT, after the sum", "BLOOM"),
    )
    for suffix in ("ForSequenceClassification", "ForTokenClassification", "Model")
    # transformers has no such classes.
    if suffix != "ForTokenClassification"
    or kind not in ("Gemma3", "GPT-2", "GPT", "GPT-J", "OPT, after the sum")
]
OTHER_HEADS += [("Gemma3, two sides", suffix) for suffix in ("ForSequenceClassification", "Model")]
OTHER_HEADS += [(kind, suffix) for kind, all in later_decoders.HEADS.items() for suffix in all]
OTHER_CLASSES = {KINDS[kind][0] + suffix for kind, suffix in OTHER_HEADS}
RNG = np.random.default_rng(0)
IDS = RNG.integers(3, 37, (3, 11))


def class_name(family: str, suffix: str = "ForCausalLM") -> str:
    usual = family + suffix
    return CLASS.get(family, usual) if suffix == "ForCausalLM" else usual


def random_model(kind: str, suffix: str = "ForCausalLM", **more: Any) -> Any:
    """A model of transformers with random weights; eager attention, which knows every option."""
    family, fields = KINDS[kind]
    torch.manual_seed(0)
    sizes = {n: x for n, x in SIZES.items() if n not in OTHER_SIZES.get(family, ())}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **fields, **more})
    config._attn_implementation = config._experts_implementation = "eager"
    if family == "Falcon":
        config._attn_implementation = "sdpa"  # its eager form adds the biases of ALiBi twice
    theirs = getattr(transformers, class_name(family, suffix))(config).eval()
    scale = 0.0 if "Gemma" in family else 0.7  # a Gemma adds 1
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else scale, 0.2)
    return theirs


@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=[] if x == "GPT-2" else pytest.mark.slow) for x in KINDS],
)
def pair(request, tmp_path_factory):
    """A random model of transformers, and the same model loaded from its folder."""
    theirs = random_model(request.param)
    folder = tmp_path_factory.mktemp("decoder")
    theirs.save_pretrained(folder)
    return theirs, *models.load(folder)


def test_logits_and_gradients(pair, assert_close):
    theirs, model, params = pair

    def loss(params):
        logits = model.apply({"params": params}, input_ids=IDS).logits
        return jnp.mean(jnp.square(logits)), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    expected = theirs(torch.tensor(IDS)).logits
    expected.square().mean().backward()
    assert_close(logits, expected.detach().numpy())
    note_answers(theirs, "import", logits, expected.detach())
    expected = gradients_of(theirs, model.config)
    jax.tree.map(assert_close, gradients, expected)
    note_gradients(theirs, "gradients", gradients, expected)


FIRST = {family: kind for kind, (family, _) in reversed(KINDS.items())}
"""The first kind of each family."""
OTHER_CACHES = (
    *("Llama, dynamic, biases", "Phi3, longrope", "Falcon, ALiBi", "Qwen3, windows"),
    "SmolLM3, windows",
)
"""Further kinds whose cached calls compute other positions or windows than the first kind's."""
BEAMS = ("GPT-2", "Mistral", "Gemma3", "Mixtral", "BLOOM")
"""One kind for each form of a cache: positions in embeddings, windows, both, experts, ALiBi."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "settings"),
    [
        *((kind, {"num_beams": 1}) for kind in (*FIRST.values(), *OTHER_CACHES)),
        *((kind, {"num_beams": 3, "num_return_sequences": 2}) for kind in BEAMS),
    ],
    indirect=["pair"],
)
def test_decoded_tokens(pair, settings):
    """Greedy and beam search, with prompts that are padded on the left."""
    theirs, model, params = pair
    ids, mask = IDS.copy(), np.ones_like(IDS)
    ids[1, :4], mask[1, :4] = 0, 0
    if model.config.rope_scaling and model.config.rope_scaling.kind in ("dynamic", "longrope"):
        ids, mask = ids[:1], mask[:1]  # transformers takes the length of the longest row for all
    settings = {**settings, "max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": 2}
    expected = theirs.generate(
        torch.tensor(ids), attention_mask=torch.tensor(mask), do_sample=False, **settings
    )
    found = models.generate(model, params, ids, attention_mask=mask, **settings)
    np.testing.assert_array_equal(found, expected.numpy())
    note_tokens(theirs)


def test_exported_weights_are_those_that_were_read(pair, tmp_path, assert_close):
    theirs, model, params = pair
    write_weights(tmp_path, model.config, params)
    loaded, info = type(theirs).from_pretrained(
        tmp_path, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = theirs.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    for name, tensor in loaded.state_dict().items():
        np.testing.assert_array_equal(tensor, state[name], err_msg=name)
    with torch.no_grad():
        found, expected = loaded(torch.tensor(IDS)).logits, theirs(torch.tensor(IDS)).logits
    assert_close(found, expected)
    note_answers(loaded, "export", jnp.asarray(found), expected)
    again, params_again = models.load(tmp_path)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama, dynamic, biases", "Phi3, longrope", "Gemma3"])
def test_inputs_longer_than_the_trained(kind, tmp_path, assert_close):
    theirs = random_model(kind)
    theirs.save_pretrained(tmp_path)
    model, params = models.load(tmp_path)
    ids = np.concatenate([IDS, IDS], axis=1)
    expected = theirs(torch.tensor(ids)).logits.detach()
    # Made longer, it scales its rotary positions by the length that it had.
    longer = models.create(model.config.with_max_length(100))
    for each in (model, longer):
        assert_close(jax.jit(each.apply)({"params": params}, input_ids=ids).logits, expected)


def test_a_scaling_that_only_we_have_is_not_exported():
    scaling = RotaryScaling(kind="dynamic", factor=2.0)
    assert rotary_to_hf(50.0, scaling)["rope_type"] == "dynamic"
    with pytest.raises(WeightsError, match=r"dynamic .*original_length 8.*max_position"):
        rotary_to_hf(50.0, scaling.of_length(8))


@pytest.mark.parametrize(
    "scaling",
    [
        RotaryScaling(kind="dynamic", factor=2.0),
        RotaryScaling(kind="yarn", original_length=8),
        RotaryScaling(
            kind="longrope", original_length=8, short_factors=(1.0, 1.0), long_factors=(2.0, 3.0)
        ),
        RotaryScaling(kind="linear", factor=2.0),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_a_scaling_of_a_length_is_the_same_in_a_longer_model(scaling):
    positions = np.arange(20)[None]
    ours, theirs = (
        rotary_positions(positions, 4, 50.0, scaling=s, max_length=length)
        for s, length in ((scaling.of_length(16), 100), (scaling, 16))
    )
    np.testing.assert_array_equal(ours.cos, theirs.cos)
    other = rotary_positions(positions, 4, 50.0, scaling=scaling, max_length=100)
    assert scaling.kind == "linear" or not np.array_equal(ours.cos, other.cos)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "suffix"), OTHER_HEADS)
def test_other_heads(kind, suffix, tmp_path, assert_close):
    theirs = random_model(kind, suffix, **({} if "Model" in suffix else {"num_labels": 3}))
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    model, params = models.load(tmp_path / "hf")
    ids, mask = IDS.copy(), np.ones_like(IDS)
    ids[1, 7:], mask[1, 7:] = 0, 0
    found = jax.jit(model.apply)({"params": params}, input_ids=ids, attention_mask=mask)
    expected = theirs(torch.tensor(ids), attention_mask=torch.tensor(mask))
    name = "last_hidden_state" if "Model" in suffix else "logits"
    ours, answers = getattr(found, name), getattr(expected, name).detach()
    if ours.shape[:2] == mask.shape:  # what padding computes is of no use
        ours, answers = np.asarray(ours)[mask == 1], answers[torch.tensor(mask) == 1]
    assert_close(ours, answers)
    note_answers(theirs, "import", jnp.asarray(ours), answers)
    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", model.config, params)
    again = type(theirs).from_pretrained(tmp_path / "ours", pad_token_id=0).eval()
    for n, tensor in again.state_dict().items():
        np.testing.assert_array_equal(tensor, theirs.state_dict()[n], err_msg=n)
    written = getattr(again(torch.tensor(ids), attention_mask=torch.tensor(mask)), name).detach()
    written = written[torch.tensor(mask) == 1] if written.shape[:2] == mask.shape else written
    note_answers(again, "export", jnp.asarray(ours), written)


@pytest.mark.parametrize("width", [6, 7])
def test_a_window_with_two_sides_reaches_as_far_as_theirs(width, tmp_path):
    """What a token sees are the rows of the embedding that its hidden state has a gradient for."""
    options = {
        "sliding_window": width,
        "num_hidden_layers": 1,
        "layer_types": ["sliding_attention"],
    }
    theirs = random_model("Gemma3, two sides", "Model", **options)
    theirs.save_pretrained(tmp_path)
    ids, position = np.arange(3, 16)[None], 6
    theirs(torch.tensor(ids)).last_hidden_state[0, position].sum().backward()
    table = theirs.get_input_embeddings().weight.grad
    model, params = models.load(tmp_path)

    def answer(params):
        return model.apply({"params": params}, ids).last_hidden_state[0, position].sum()

    gradient = jax.grad(answer)(params)["token_embedding"]["embedding"]
    ours, right = (np.flatnonzero(np.abs(x).sum(axis=1)) for x in (gradient, table.numpy()))
    np.testing.assert_array_equal(ours, right)
    np.testing.assert_array_equal(ours - 3 - position, np.arange(-(width // 2), width // 2 + 1))


EARLIER_FILES: list[tuple[str, dict[str, Any]]] = [
    (
        "gpt-neox-20b",
        {
            **{
                "attention_probs_dropout_prob": 0,
                "hidden_dropout_prob": 0,
                "hidden_act": "gelu_fast",
            },
            **{"rotary_emb_base": 10_000, "rotary_pct": 0.25, "model_type": "gpt_neox"},
        },
    ),
    (
        "gpt-j-6b",
        {"model_type": "gptj", "rotary": True, "scale_attn_weights": True, "n_inner": None},
    ),
    (
        "opt-125m",
        {"model_type": "opt", "activation_dropout": 0.0, "_remove_final_layer_norm": False},
    ),
    (
        "bloom-560m",
        {
            **{"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
            **{"offset_alibi": 100, "pretraining_tp": 1, "skip_bias_add": True, "seq_length": 2048},
        },
    ),
    (
        "falcon-7b",
        {
            "model_type": "falcon",
            "apply_residual_connection_post_layernorm": False,
        },
    ),
    (
        "smollm3-3b",
        {
            **{"model_type": "smollm3", "max_position_embeddings": 65_536, "rope_theta": 5e6},
            **{"max_window_layers": 28, "pretraining_tp": 2, "no_rope_layers": [1, 1, 1, 0] * 9},
        },
    ),
]
"""Published sizes, and fields of their files that transformers does not write any more."""


@pytest.mark.parametrize(("preset", "fields"), EARLIER_FILES)
def test_files_as_they_were_published(preset, fields):
    mapping = mapping_of_type(fields["model_type"], "config.json")
    assert mapping.config_from_hf(fields, "config.json") == models.preset(preset)


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3Text"])
def test_a_gemma_without_windows_is_one_in_transformers(family):
    sizes = {**SIZES, "head_dim": 8, "layer_types": ["full_attention"] * 3}
    stated = getattr(transformers, f"{family}Config")(**sizes).to_dict()
    mapping = mapping_of_type(stated["model_type"], "config.json")
    found = mapping.config_from_hf(stated, "config.json")
    written = mapping.config_to_hf(found)
    assert mapping.config_from_hf(written, "config.json") == found
    assert found.window is None
    config = getattr(transformers, f"{family}Config")(**written)
    theirs = getattr(transformers, class_name(family))(config)
    assert theirs(torch.tensor(IDS)).logits.isfinite().all()


def test_half_precision_is_read_as_it_is_stored(tmp_path):
    theirs = random_model("Qwen3").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    _, params = models.load(tmp_path)
    stored = theirs.model.layers[1].self_attn.q_norm.weight.detach().float()
    np.testing.assert_array_equal(params["layers"]["attention"]["query_norm"]["scale"][1], stored)


REFUSED = {
    "Llama": [
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "type 'ntk'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}},
            "unsupported fields .*: mrope_section",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "linear .*factor"),
        (
            {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 8.0}},
            "rope_theta 7.0, .* 8.0",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "ForQuestionAnswering is not"),
        ({"layer_types": ["full_attention"]}, "fields: layer_types"),
    ],
    "Qwen2": [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types .*full_attention, sliding"),
        ({"layer_types": ["full_attention"]}, "3 layers"),
        (
            {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1},
            "window must .*0",
        ),
    ],
    "Gemma": [({"use_bidirectional_attention": True}, "use_bidirectional_attention True")],
    "Gemma3Text": [
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention, .*not supported",
        ),
    ],
    "Olmo3": [
        ({"rope_parameters": {"rope_theta": 50.0}}, "full_attention .*sliding_attent"),
    ],
    "SmolLM3": [
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers \[1, 0\]"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval 0 must"),
        ({"layer_types": ["sliding_attention"] * 3}, "use_sliding_window .*sliding_window state"),
    ],
    "Falcon": [
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2 "),
        ({"multi_query": False, "num_kv_heads": 2}, "num_kv_heads 2 .*new_decoder_arch"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
    "GPTNeoX": [
        (
            {
                "rope_parameters": {
                    **{"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5},
                }
            },
            "3 of 6 dimensions",
        ),
    ],
    "Phi3": [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "type 'linear' .*'default', 'longrope'",
        ),
    ],
}


@pytest.mark.parametrize(
    ("family", "fields", "message"), [(f, *case) for f, cases in REFUSED.items() for case in cases]
)
def test_unsupported_options_are_refused_by_name(family, fields, message):
    model_type = getattr(transformers, f"{family}Config").model_type
    sizes = {n: x for n, x in SIZES.items() if n not in OTHER_SIZES.get(family, ())}
    config = {"model_type": model_type, **sizes, **fields}
    with pytest.raises((WeightsError, ValueError), match=message):
        mapping_of_type(model_type, "config.json").config_from_hf(config, "config.json")


DROPOUTS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "Falcon": ({"hidden_dropout": 0.2, "attention_dropout": 0.1}, {"feed_forward": 0.2}),
    "StableLm": ({"hidden_dropout": 0.2}, {"attention": 0.0, "feed_forward": 0.2}),
    "Phi3": ({"resid_pdrop": 0.2, "embd_pdrop": 0.3}, {"attention": 0.2, "feed_forward": 0.2}),
}
"""The dropout fields of a family, and the rates of the outputs of sublayers."""


@pytest.mark.parametrize("family", DROPOUTS)
def test_dropout_rates_of_sublayers(family):
    given, expected = DROPOUTS[family]
    theirs = getattr(transformers, f"{family}Config")(**given)
    mapping = mapping_of_type(theirs.model_type, "config.json")
    config: Any = mapping.config_from_hf(theirs.to_dict(), "config.json")
    assert {name: config.residual_dropout_rate(name) for name in expected} == expected
    assert config.attention_dropout_rate == given.get("attention_dropout", 0.0)
    written = mapping.config_to_hf(config)
    assert written == written | {name: x for name, x in given.items() if name != "embd_pdrop"}
    assert mapping.config_from_hf(written, "config.json") == config


@pytest.mark.parametrize("kind", ["Falcon", "StableLM"])
@pytest.mark.parametrize(("fields", "rate"), [({}, 0.2), ({"classifier_dropout": 0.3}, 0.3)])
def test_the_dropout_of_a_classifier_defaults_to_that_of_the_layers(kind, fields, rate):
    theirs = random_model(kind, "ForTokenClassification", hidden_dropout=0.2, **fields)
    assert theirs.dropout.p == rate
    mapping = mapping_of_type(theirs.config.model_type, "config.json")
    named = theirs.config.to_dict() | {"architectures": [type(theirs).__name__]}
    config: Any = mapping.config_from_hf(named, "config.json")
    assert config.classifier_dropout_rate == rate
    written = type(theirs.config)(**mapping.config_to_hf(config))
    assert type(theirs)(written).dropout.p == rate


@pytest.mark.parametrize(
    "preset",
    [
        *("llama3.1-8b", "mistral-7b", "qwen2-7b", "qwen3-0.6b", "gemma-2b", "gemma2-27b"),
        *(
            "gemma3-27b",
            "embeddinggemma-300m",
            "phi3-mini",
            "phi4",
            "phi4-mini",
            "olmo2-32b",
            "olmo3-32b",
            "smollm3-3b",
        ),
        *("granite3.3-8b", "stablelm2-12b", "falcon-7b", "falcon-40b", "falcon-rw-1b"),
    ],
)
def test_a_published_size_survives_its_config_json(preset, tmp_path):
    """Through ours and through transformers' own reading of it."""
    config = models.preset(preset)
    mapping = mapping_of(config)
    fields = mapping.config_to_hf(config)
    again = mapping.config_from_hf(json.loads(json.dumps(fields)), "config.json")
    assert models.create(again).config == models.create(config).config
    (tmp_path / "config.json").write_text(json.dumps(fields))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    read = mapping.config_from_hf(json.loads((tmp_path / "config.json").read_text()), "config.json")
    assert read == again
