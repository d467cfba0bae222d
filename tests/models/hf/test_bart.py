"""BART, mBART and Pegasus against transformers: logits, gradients, tokens, both directions."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flaxzoo import models
from flaxzoo.models.hf.encoder_decoders.bart import MAPPING
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.hf.tensors.mapping import WeightsError
from safetensors.numpy import load_file, save_file

from ...support.hf_weights import gradients_of
from ...support.parity import note_answers, note_gradients, note_tokens

V, PAD, START, END = 41, 1, 3, 2
FIELDS = {
    "vocab_size": V,
    "d_model": 24,
    "max_position_embeddings": 33,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 28,
    "dropout": 0.0,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
}
WRITES = "ForConditionalGeneration"
KINDS: dict[str, dict[str, Any]] = {
    "BART": {"activation_function": "silu"},
    "BART, scaled and untied": {
        "scale_embedding": True,
        "tie_word_embeddings": False,
        "decoder_layers": 4,
        "activation_function": "relu",
    },
    "mBART": {"model": "MBart", "scale_embedding": True},
    "mBART, untied": {"model": "MBart", "tie_word_embeddings": False, "encoder_layers": 1},
    "Pegasus": {"model": "Pegasus", "activation_function": "relu"},
    "labels": {"cls": "ForSequenceClassification", "num_labels": 4, "classifier_dropout": 0.3},
    "labels, untied": {"cls": "ForSequenceClassification", "tie_word_embeddings": False},
    "answers": {"cls": "ForQuestionAnswering", "scale_embedding": True},
}
WRITERS = [name for name, fields in KINDS.items() if "cls" not in fields]
BEAMS = {"num_beams": 3, "num_return_sequences": 2}
DRAW = np.random.default_rng(0)
SOURCE = DRAW.integers(4, V, (3, 31))
SOURCE[:, (9, 19)] = END  # the last one classifies
INPUTS = {
    "input_ids": SOURCE,
    "attention_mask": np.array([[1] * 31, [1] * 20 + [0] * 11, [0] * 9 + [1] * 22]),
}
BOTH = INPUTS | {
    "decoder_input_ids": DRAW.integers(4, V, (3, 27)),
    "decoder_attention_mask": np.array([[1] * 27, [1] * 20 + [0] * 7, [0] * 5 + [1] * 22]),
}


def made(model="Bart", cls=WRITES, **fields):
    """A random model of transformers, with no parameter at its initial value."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{model}Config")(**{**FIELDS, **fields})
    theirs = getattr(transformers, model + cls)(config).eval()
    for name, parameter in theirs.named_parameters():
        if model != "Pegasus" or "embed_positions" not in name:  # whose positions are a constant
            torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.2)
    if cls == WRITES:
        torch.nn.init.normal_(theirs.final_logits_bias)
    return theirs


def inputs_of(theirs):
    """Tokens of both sides; of the source alone for heads whose target it is."""
    if theirs.config.model_type == "pegasus":  # whose positions are counted without padding
        return {name: x[:2] for name, x in BOTH.items()}
    return BOTH if type(theirs).__name__.endswith((WRITES, "Model")) else INPUTS


def answers(output, inputs):
    """The arrays of a head, padding's outputs taken out, for they mean nothing."""
    if "start_logits" in dir(output):
        return output.start_logits, output.end_logits
    logits = output.logits
    if logits.ndim == 2:
        return (logits,)
    mask = inputs["decoder_attention_mask"][..., None]
    return (logits * (torch.tensor(mask) if isinstance(logits, torch.Tensor) else mask),)


def torch_answers(theirs):
    inputs = inputs_of(theirs)
    return answers(theirs(**{name: torch.tensor(x) for name, x in inputs.items()}), inputs)


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A random model of transformers, and the same model loaded from its folder, in two files."""
    theirs = made(**KINDS[request.param])
    folder = tmp_path_factory.mktemp("bart")
    theirs.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return theirs, *models.load(folder)


@pytest.mark.slow
def test_logits_and_gradients(pair, assert_close):
    theirs, model, params = pair
    inputs = inputs_of(theirs)

    def loss(params):
        found = answers(model.apply({"params": params}, **inputs), inputs)
        return sum(jnp.mean(jnp.square(x)) for x in found), found

    (_, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    if type(theirs).__name__.endswith(WRITES):
        theirs.final_logits_bias.requires_grad_()
    expected = torch_answers(theirs)
    torch.stack([x.square().mean() for x in expected]).sum().backward()
    for ours, x in zip(found, expected, strict=True):
        assert_close(ours, x.detach().numpy())
        note_answers(theirs, "import", ours, x.detach())
    expected = gradients_of(theirs, model.config)
    jax.tree.map(assert_close, gradients, expected)
    note_gradients(theirs, "gradients", gradients, expected)


@pytest.mark.slow
def test_the_way_back_is_bit_for_bit(pair, tmp_path, assert_close):
    theirs, model, params = pair
    write_weights(tmp_path, model.config, params)
    loaded: Any = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    again, info = loaded
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = inputs_of(theirs)
    ours = answers(jax.jit(model.apply)({"params": params}, **inputs), inputs)
    with torch.no_grad():
        for found, x, y in zip(
            ours, torch_answers(again.eval()), torch_answers(theirs), strict=True
        ):
            assert_close(x.numpy(), y.numpy())
            note_answers(theirs, "export", found, x)
    there = theirs.state_dict()
    written = load_file(tmp_path / "model.safetensors")
    # Where nothing is shared, no class reads the table of that name.
    copies = ["embed_tokens", "lm_head"] if model.config.share_embeddings else ["shared"]
    for name, x in there.items():
        if not any(part in name for part in copies):
            np.testing.assert_array_equal(written.pop(name), x.numpy())
    assert all("shared" in name for name in written)
    back, same = models.load(tmp_path)
    assert back.config == model.config
    assert jax.tree.all(jax.tree.map(np.array_equal, same, params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "options"),
    [
        ("BART", {"forced_eos_token_id": END}),
        (
            "BART, scaled and untied",
            {**BEAMS, "forced_bos_token_id": 7, "forced_eos_token_id": END},
        ),
        ("Pegasus", {}),
        ("Pegasus", {"num_beams": 4}),
        ("mBART", {"forced_bos_token_id": 30}),
        ("mBART, untied", {**BEAMS, "forced_bos_token_id": 30, "length_penalty": 2.0}),
    ],
    indirect=["pair"],
)
@pytest.mark.filterwarnings("ignore")  # of transformers, about its own flags
def test_decoded_tokens(pair, options):
    """Greedy and beam search, of sources that are padded on either side."""
    theirs, model, params = pair
    ends = [END, *range(20, 26)]  # so that targets end at different places
    options = {**options, "max_new_tokens": 9, "eos_token_id": ends, "pad_token_id": PAD}
    options["decoder_start_token_id"] = START
    given = {name: torch.tensor(x) for name, x in INPUTS.items()}
    expected = theirs.generate(**given, do_sample=False, **options)
    found = models.generate(model, params, **INPUTS, **options)
    np.testing.assert_array_equal(found, expected.numpy())
    if "forced_bos_token_id" in options:
        assert (found[:, 1] == options["forced_bos_token_id"]).all()
    note_tokens(theirs)


@pytest.mark.parametrize(
    ("model", "fields"),
    [("Bart", {}), ("MBart", {"tie_word_embeddings": False}), ("Pegasus", {})],
)
def test_a_body_without_logits_leaves_with_those_of_its_table(model, fields, tmp_path):
    theirs = made(model, "Model", **fields)
    theirs.save_pretrained(tmp_path / "hf")
    ours, params = models.load(tmp_path / "hf")
    inputs = inputs_of(theirs)
    given = {name: torch.tensor(x) for name, x in inputs.items()}
    mask = inputs["decoder_attention_mask"][..., None]
    expected = theirs(**given).last_hidden_state.detach().numpy() * mask
    found = jax.jit(ours.apply)({"params": params}, **inputs).last_hidden_state * mask
    np.testing.assert_allclose(found, expected, atol=1e-5)
    note_answers(theirs, "import", found, expected)
    if fields:
        return
    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", ours.config, params)
    cls = getattr(transformers, model + WRITES)
    again, info = cls.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    found = again.eval()(**given, output_hidden_states=True).decoder_hidden_states[-1]
    found = found.detach().numpy() * mask
    np.testing.assert_allclose(found, expected, atol=1e-5)
    note_answers(theirs, "export", expected, found)


def test_half_precision_and_older_names_of_the_one_table(tmp_path):
    """Files hold the table under any of four names, and may lack the bias of the logits."""
    theirs = made(**KINDS["mBART"]).half()
    theirs.save_pretrained(tmp_path)
    expected = models.load(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    table = tensors.pop("model.shared.weight")
    names = [f"model.{side}.embed_tokens.weight" for side in ("decoder", "encoder")]
    names.append("lm_head.weight")
    copies: list[dict[str, Any]] = [{name: table} for name in names]
    copies += [dict.fromkeys(("model.shared.weight", *names), table)]
    for tables in copies:
        save_file({**tensors, **tables}, file)
        model, params = models.load(tmp_path)
        assert model.config == expected[0].config
        assert jax.tree.all(jax.tree.map(np.array_equal, params, expected[1]))
    bias = tensors.pop("final_logits_bias")
    save_file({**tensors, "model.shared.weight": table}, file)
    model, params = models.load(tmp_path)
    assert not model.config.output_bias
    assert "output_bias" not in params
    save_file({**tensors, names[0]: table, names[1]: table + 1, "final_logits_bias": bias}, file)
    with pytest.raises(WeightsError, match=r"encoder.embed_tokens.weight .*tied .*differs"):
        models.load(tmp_path)


def test_a_source_and_an_output_of_older_untied_files(tmp_path):
    """Before transformers 5 source and target had one table, also beside an output of its own."""
    theirs = made(tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if "embed_tokens" not in name}
    save_file(tensors, file)
    _, params = models.load(tmp_path)
    for name in ("source_embedding", "token_embedding"):
        np.testing.assert_array_equal(params[name]["embedding"], tensors["model.shared.weight"])


def config_of(name="bart", **fields):
    return MAPPING.config_from_hf({"model_type": name, **FIELDS, **fields}, "config.json")


LABELS = {"architectures": ["BartForSequenceClassification"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BartForCausalLM"]}, "BartForCausalLM .*not supported"),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop 0.1 .*0.0"),
        ({"decoder_layerdrop": 0.1}, "decoder_layerdrop 0.1 .*0.0"),
        ({"normalize_before": True}, "normalize_before True .*False"),
        ({"normalize_embedding": False}, "normalize_embedding False"),
        ({"static_position_embeddings": True}, "static_position_embeddings True"),
        ({"is_decoder": True}, "is_decoder True .*False"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder False"),
        ({"activation_function": "tanh"}, "activation_function 'tanh'"),
        ({"decoder_attention_heads": 5}, "decoder_num_heads 5"),
        ({"hidden_widths": 3}, "fields: hidden_widths"),
        ({"classifier_dropout": 1.5}, "classifier_dropout must .*1.5"),
        ({**LABELS, "eos_token_id": [2, 3]}, r"eos_token_id \[2, 3\]"),
        ({**LABELS, "decoder_start_token_id": 41}, "start_id 41 .*vocabulary"),
        (
            {"name": "mbart", "architectures": ["MBartForSequenceClassification"]},
            "MBartForSequenceClassification .*not supported",
        ),
    ],
)
def test_unsupported_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        config_of(**fields)


# Fields of published files that are not defaults, as far as they change the model.
PUBLISHED = {
    "bart-base": {
        **{"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072},
        **{"decoder_ffn_dim": 3072, "encoder_attention_heads": 12, "decoder_attention_heads": 12},
        **{"architectures": ["BartModel"], "add_final_layer_norm": False, "classif_dropout": 0.1},
    },
    "bart-large": {"architectures": ["BartModel"], "normalize_embedding": True},
    "mbart-large-cc25": {
        **{"model_type": "mbart", "vocab_size": 250027, "scale_embedding": True},
        **{"normalize_before": True, "add_final_layer_norm": True, "add_bias_logits": False},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    found = MAPPING.config_from_hf({"model_type": "bart", **PUBLISHED[name]}, "config.json")
    preset = models.preset(name)
    assert (found.feed_forward_dim, found.decoder) == (
        preset.d_ff or 4 * preset.d_model,
        found.decoder,
    )
    written = MAPPING.config_to_hf(found)
    assert written == {
        **MAPPING.config_to_hf(preset),
        "architectures": written["architectures"],
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_eps": 1e-6},
        {"d_k": 3},
        {"encoder_causal": True},
        {"tie_output": False, "output_bias": True},
        {"share_embeddings": False, "source_vocab_size": 7},
    ],
)
def test_what_transformers_lacks_is_refused_by_name(fields):
    config = models.preset("bart-base")
    config = type(config)(**{**config.__dict__, **fields})
    with pytest.raises(WeightsError, match="bart has no"):
        MAPPING.config_to_hf(config)


@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_tokens_of_a_config_without_generation_settings(name, tmp_path):
    made(*(("MBart",) if name == "mbart" else ())).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id", "forced_eos_token_id")
    for field in tokens:
        config.pop(field, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = models.generation_arguments(tmp_path)
    assert [found[field] for field in tokens] == [0, 2, 1, 2]
    assert found["decoder_start_token_id"] == START
