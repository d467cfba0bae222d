"""T5 and mT5 against transformers: logits, gradients and tokens, import and export."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flaxzoo import models
from flaxzoo.models.hf.encoder_decoders import t5
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.hf.tensors.mapping import WeightsError
from safetensors.numpy import load_file, save_file

from ...support.hf_weights import gradients_of
from ...support.parity import note_answers, note_gradients, note_tokens

V = 37
FIELDS = {
    "vocab_size": V,
    "d_model": 20,
    "d_kv": 6,
    "d_ff": 28,
    "num_heads": 3,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "1.0": {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10},
    "1.1, tied": {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,  # to transformers 5 only: not scaled
        "relative_attention_num_buckets": 7,
        "relative_attention_max_distance": 25,
        "layer_norm_epsilon": 0.1,
    },
    "1.1": {
        "feed_forward_proj": "gated-silu",
        "tie_word_embeddings": False,
        "own output": True,
        "num_decoder_layers": 4,
    },
    "mT5": {"model": "MT5", "own output": True, "relative_attention_num_buckets": 6},
}
BEAMS = {"num_beams": 3, "num_return_sequences": 2}
RNG = np.random.default_rng(0)
INPUTS = {
    "input_ids": RNG.integers(2, V, (3, 31)),
    "attention_mask": np.array([[1] * 31, [1] * 20 + [0] * 11, [0] * 9 + [1] * 22]),
    "decoder_input_ids": RNG.integers(2, V, (3, 27)),
    "decoder_attention_mask": np.array([[1] * 27, [1] * 20 + [0] * 7, [0] * 5 + [1] * 22]),
}
GIVEN = {name: torch.tensor(x) for name, x in INPUTS.items()}
WEIGHTS = INPUTS["decoder_attention_mask"][..., None]  # padding's outputs mean nothing


def made(model="T5", cls="ForConditionalGeneration", **fields):
    """A random model of transformers; its output has its own matrix only if that is asked."""
    torch.manual_seed(0)
    own_output = fields.pop("own output", False)
    config = getattr(transformers, f"{model}Config")(**{**FIELDS, **fields})
    theirs = getattr(transformers, model + cls)(config).eval()
    if own_output:
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.15)
    return theirs


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A random model of transformers, and the same model loaded from its folder, in two files."""
    theirs = made(**KINDS[request.param])
    folder = tmp_path_factory.mktemp("t5")
    theirs.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return theirs, *models.load(folder)


@pytest.mark.slow
def test_logits_and_gradients(pair, assert_close):
    theirs, model, params = pair
    assert model.config.tie_output == (theirs.lm_head.weight is theirs.shared.weight)

    def loss(params):
        logits = model.apply({"params": params}, **INPUTS).logits * WEIGHTS
        return jnp.mean(jnp.square(logits)), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    expected = theirs(**GIVEN).logits * torch.tensor(WEIGHTS)
    expected.square().mean().backward()
    assert_close(logits, expected.detach().numpy())
    note_answers(theirs, "import", logits, expected.detach())
    expected = gradients_of(theirs, model.config)
    jax.tree.map(assert_close, gradients, expected)
    note_gradients(theirs, "gradients", gradients, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tie")  # an own output, and a field that is said to tie it
def test_the_way_back_is_bit_for_bit(pair, tmp_path, assert_close):
    theirs, model, params = pair
    write_weights(tmp_path, model.config, params)
    loaded: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    again, info = loaded
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = again.eval()(**GIVEN).logits * torch.tensor(WEIGHTS)
        expected = theirs(**GIVEN).logits * torch.tensor(WEIGHTS)
    assert_close(logits.numpy(), expected.numpy())
    ours = jax.jit(model.apply)({"params": params}, **INPUTS).logits * WEIGHTS
    again.config.model_type = theirs.config.model_type
    if theirs.config.model_type == "t5":
        note_answers(again, "export", ours, logits)
    there = {name: x for name, x in theirs.state_dict().items() if "embed_tokens" not in name}
    written = load_file(tmp_path / "model.safetensors")
    if model.config.tie_output:
        del there["lm_head.weight"]
    assert written.keys() == there.keys()
    assert all(np.array_equal(written[name], x.numpy()) for name, x in there.items())
    back, same = models.load(tmp_path)
    assert back.config == model.config
    assert jax.tree.all(jax.tree.map(np.array_equal, same, params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "beams"),
    [("1.0", BEAMS), ("1.1, tied", {}), ("1.1", BEAMS), ("mT5", {})],
    indirect=["pair"],
)
@pytest.mark.filterwarnings("ignore")  # of transformers, about its own flags
def test_decoded_tokens(pair, beams):
    """Greedy and beam search, of sources that are padded on either side."""
    theirs, model, params = pair
    ends = [1, *range(20, 28)]  # so that targets end at different places
    options = {**beams, "max_new_tokens": 9, "eos_token_id": ends, "pad_token_id": 0}
    source = {name: x for name, x in GIVEN.items() if "decoder" not in name}
    expected = theirs.generate(
        **source, decoder_start_token_id=0, do_sample=False, use_cache=False, **options
    )
    found = models.generate(
        model,
        params,
        INPUTS["input_ids"],
        attention_mask=INPUTS["attention_mask"],
        decoder_start_token_id=0,
        **options,
    )
    np.testing.assert_array_equal(found, expected.numpy())
    note_tokens(theirs)


@pytest.mark.parametrize("model", ["T5", "MT5"])
def test_a_body_without_logits(model, tmp_path, assert_close):
    theirs = made(model, "Model")
    theirs.save_pretrained(tmp_path / "hf")
    ours, params = models.load(tmp_path / "hf")
    expected = theirs(**GIVEN).last_hidden_state.detach() * torch.tensor(WEIGHTS)
    found = jax.jit(ours.apply)({"params": params}, **INPUTS).last_hidden_state * WEIGHTS
    assert_close(found, expected.numpy())
    note_answers(theirs, "import", found, expected)


def test_half_precision_and_older_names_of_the_one_table(tmp_path):
    """Files hold the table under any of four names, some with copies of it and a dead tensor."""
    theirs = made(**KINDS["1.0"]).bfloat16()
    theirs.save_pretrained(tmp_path)
    expected = models.load(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    table = tensors.pop("shared.weight")
    dead = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    names = "decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "lm_head.weight"
    copies: list[dict[str, Any]] = [{name: table} for name in names]
    copies += [dict.fromkeys(("shared.weight", *names), table) | {dead: table[:2]}]
    for tables in copies:
        save_file({**tensors, **tables}, file)
        model, params = models.load(tmp_path)
        assert model.config == expected[0].config
        assert jax.tree.all(jax.tree.map(np.array_equal, params, expected[1]))
    save_file({**tensors, "shared.weight": table, names[1]: table + 1}, file)
    with pytest.raises(WeightsError, match=r"encoder.embed_tokens.weight .*shared.weight"):
        models.load(tmp_path)


def config_of(**fields):
    return t5.config_from_hf({"model_type": "t5", **FIELDS, **fields}, "config.json")


@pytest.mark.parametrize("proj", ["relu", "gated-gelu", "gelu", "gated-silu", "gelu_new"])
def test_activations_as_transformers_reads_them(proj):
    theirs = transformers.T5Config(**{**FIELDS, "feed_forward_proj": proj})
    found = config_of(feed_forward_proj=proj)
    assert found.gated == theirs.is_gated_act
    assert found.activation == t5.ACTIVATIONS[theirs.dense_act_fn]
    stored = {"feed_forward_proj": proj, "dense_act_fn": "silu", "is_gated_act": True}
    theirs = transformers.T5Config(**{**FIELDS, **stored})
    assert (theirs.dense_act_fn, theirs.is_gated_act) == ("silu", True)
    assert (config_of(**stored).activation, config_of(**stored).gated) == ("silu", True)


@pytest.mark.parametrize("tied", [{}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("scaled", [{}, {"scale_decoder_outputs": False}])
def test_scaled_outputs_as_transformers_reads_them(tied, scaled):
    theirs = transformers.T5Config(**FIELDS, **tied, **scaled)
    assert config_of(**tied, **scaled).scale_output == theirs.scale_decoder_outputs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["T5EncoderModel"]}, "T5EncoderModel .*not supported"),
        ({"architectures": ["T5ForQuestionAnswering"]}, "T5ForQuestionAnswering"),
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj 'gated-tanh'"),
        ({"feed_forward_proj": "double-relu"}, "feed_forward_proj 'double-relu'"),
        ({"is_gated_act": 1}, "is_gated_act 1 .*True or False"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder False .*True"),
        ({"is_decoder": True}, "is_decoder True .*False"),
        ({"feed_forward_size": 3}, "fields: feed_forward_size"),
        ({"relative_attention_max_distance": 16}, "position_distance must .*16"),
    ],
)
def test_unsupported_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        config_of(**fields)


# Fields of published files that are not defaults.
PUBLISHED = {
    "t5-large": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_layers": 24},
    "mt5-small": {"model_type": "mt5", "feed_forward_proj": "gated-gelu", "vocab_size": 250112},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name, tmp_path):
    fields = {
        "model_type": "t5",
        "num_decoder_layers": None,
        "tie_word_embeddings": name == "t5-large",
        **PUBLISHED[name],
    }
    assert t5.config_from_hf(fields, "config.json") == models.preset(name)
    (tmp_path / "config.json").write_text(json.dumps(t5.config_to_hf(models.preset(name))))
    theirs = transformers.T5Config.from_pretrained(tmp_path)
    assert theirs.scale_decoder_outputs == models.preset(name).scale_output
    assert (theirs.d_kv, theirs.d_ff) == (64, models.preset(name).d_ff)


@pytest.mark.parametrize("fields", [{"scale_scores": True}, {"d_k": 3}])
def test_what_transformers_lacks_is_refused_by_name(fields):
    config = models.preset("t5-small")
    config = type(config)(**{**config.__dict__, **fields})
    with pytest.raises(WeightsError, match=f"t5 .*{next(iter(fields))}"):
        t5.config_to_hf(config)


def test_tokens_of_a_config_without_generation_settings(tmp_path):
    theirs = made(**KINDS["1.0"])
    theirs.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = models.generation_arguments(tmp_path)
    assert found == {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
