"""Marian's folders: every form of them that is about, their configurations, and the way back."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.hf.load_weights import config_of_weights
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.hf.tensors.mapping import WeightsError
from safetensors.numpy import load_file, save_file

from ...support import marian
from ...support.parity import note_answers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

UNTIED = {"tie_word_embeddings": False}
IDS = {"input_ids": np.array([[5, 3, 9, 0]]), "decoder_input_ids": np.array([[42, 7, 2]])}
TOKENS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")


@pytest.fixture
def saved(tmp_path):
    """A torch model in a folder, with the arrays that it holds, tied ones and buffers as well."""

    def saved(**fields):
        theirs = marian.make(**fields)
        theirs.save_pretrained(tmp_path)
        return theirs, {name: x.detach().numpy() for name, x in theirs.state_dict().items()}

    return saved


def equal(tree, other):
    return jax.tree.all(jax.tree.map(np.array_equal, tree, other))


def rewrite(folder, tensors):
    save_file({name: np.array(x) for name, x in tensors.items()}, folder / "model.safetensors")


def edit(folder, **fields):
    """Changes a configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("shape", marian.SHAPES)
def test_tied_copies_and_buffers_are_read_to_be_compared(tmp_path, saved, shape):
    _, tensors = saved(**marian.SHAPES[shape])
    _, params = models.load(tmp_path)
    added = tensors.keys() - load_file(tmp_path / "model.safetensors").keys()
    assert {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")} <= added
    assert ("lm_head.weight" in added) == ("untied" not in shape)
    rewrite(tmp_path, tensors)
    assert equal(models.load(tmp_path)[1], params)
    for name in added:
        rewrite(tmp_path, tensors | {name: tensors[name] + 0.1})
        with pytest.raises(WeightsError, match=f"{name} .*differs"):
            models.load(tmp_path)


def test_positions_of_another_layout_are_refused(tmp_path, saved):
    _, tensors = saved()
    positions = models.sinusoidal_positions(marian.P, marian.D, layout="interleaved")
    rewrite(tmp_path, tensors | {"model.encoder.embed_positions.weight": positions})
    with pytest.raises(WeightsError, match=r"encoder.embed_positions.weight differs"):
        models.load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["shared", "own source", "untied"])
def test_a_body_without_logits(tmp_path, saved, shape):
    theirs, _ = saved(name="MarianModel", **marian.SHAPES[shape])
    model, params = models.load(tmp_path)
    with torch.no_grad():
        expected = theirs(**{name: torch.from_numpy(x) for name, x in IDS.items()})
    ours = jax.jit(model.apply)({"params": params}, **IDS)
    np.testing.assert_allclose(ours.last_hidden_state, expected.last_hidden_state, atol=1e-5)
    note_answers(theirs, "import", ours.last_hidden_state, expected.last_hidden_state)
    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", model.config, params)
    # It leaves with the logits that it was given.
    again, info = transformers.MarianMTModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()), info
    given = {name: torch.from_numpy(x) for name, x in IDS.items()}
    with torch.no_grad():
        hidden = again.eval()(**given, output_hidden_states=True).decoder_hidden_states[-1]
    np.testing.assert_allclose(ours.last_hidden_state, hidden, atol=1e-5)
    note_answers(theirs, "export", ours.last_hidden_state, hidden)


def test_one_table_for_all_beside_untied_logits(tmp_path, saved):
    """As transformers 4 wrote it, which shared tables whatever became of the output."""
    _, tensors = saved(**UNTIED)
    kept = {name: x for name, x in tensors.items() if "embed_tokens" not in name}
    rewrite(tmp_path, kept)
    _, params = models.load(tmp_path)
    for name in ("token_embedding", "source_embedding"):
        np.testing.assert_array_equal(params[name]["embedding"], kept["model.shared.weight"])
    np.testing.assert_array_equal(params["output_embedding"]["embedding"], kept["lm_head.weight"])


@pytest.mark.parametrize("shape", ["shared", "own source"])
def test_tied_tensors_under_the_name_of_the_output(tmp_path, saved, shape):
    saved(**marian.SHAPES[shape])
    _, params = models.load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tokens = "model.shared" if shape == "shared" else "model.decoder.embed_tokens"
    rewrite(tmp_path, {"lm_head.weight": tensors.pop(f"{tokens}.weight"), **tensors})
    assert equal(models.load(tmp_path)[1], params)


@pytest.mark.parametrize("shape", marian.SHAPES)
def test_what_we_write_is_their_model(tmp_path, saved, shape):
    theirs, _ = saved(**marian.SHAPES[shape])
    model, params = models.load(tmp_path)
    folder = tmp_path / "ours"
    folder.mkdir()
    write_weights(folder, model.config, params)
    # Which tokens are special is the tokenizer's to say.
    edit(folder, **{name: getattr(theirs.config, name) for name in TOKENS})
    again, info = type(theirs).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    given = {name: torch.from_numpy(x) for name, x in IDS.items()}
    with torch.no_grad():
        answers = [m.eval()(**given).logits for m in (again, theirs)]
    # The same numbers, but where they lie in memory decides how some processors add them up.
    torch.testing.assert_close(*answers, rtol=0, atol=1e-6)
    ours = jax.jit(model.apply)({"params": params}, **IDS).logits
    np.testing.assert_allclose(ours, answers[0], atol=1e-5)
    note_answers(again, "export", ours, answers[0])
    read, back = models.load(folder)
    assert read.config == model.config
    assert equal(back, params)


@pytest.mark.slow
def test_a_model_of_ours_without_a_bias_of_logits_comes_back(tmp_path):
    config = models.EncoderDecoderConfig(
        vocab_size=43,
        max_length=32,
        num_layers=2,
        d_model=24,
        num_heads=4,
        attention_bias=True,
        position_layout="halves",
        norm_eps=1e-5,
    )
    params = models.init_params(models.create(config), jax.random.key(0))
    write_weights(tmp_path, config, params)
    read, back = models.load(tmp_path)
    assert read.config == dataclasses.replace(
        config,
        d_ff=96,
        num_decoder_layers=2,
        decoder_num_heads=4,
        decoder_d_ff=96,
        output_bias=True,
    )
    assert not back.pop("output_bias").any()
    assert equal(back, params)
    edit(tmp_path, decoder_start_token_id=42)
    theirs, info = transformers.MarianMTModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        expected = theirs.eval()(**{name: torch.from_numpy(x) for name, x in IDS.items()})
    ours = models.create(config).apply({"params": params}, **IDS)
    np.testing.assert_allclose(ours.logits, expected.logits, atol=1e-5)


# What the published folder of English to German says, and what was added to such files since.
PUBLISHED = {
    "_name_or_path": "Helsinki-NLP/opus-mt-en-de",
    "_num_labels": 3,
    "activation_dropout": 0.0,
    "activation_function": "swish",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "architectures": ["MarianMTModel"],
    "attention_dropout": 0.0,
    "bad_words_ids": [[58100]],
    "bos_token_id": 0,
    "classif_dropout": 0.0,
    "classifier_dropout": 0.0,
    "d_model": 512,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 2048,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 6,
    "decoder_start_token_id": 58100,
    "decoder_vocab_size": 58101,
    "dropout": 0.1,
    "encoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 6,
    "eos_token_id": 0,
    "extra_pos_embeddings": 58101,
    "forced_eos_token_id": 0,
    "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
    "max_length": 512,
    "max_position_embeddings": 512,
    "model_type": "marian",
    "normalize_before": False,
    "normalize_embedding": False,
    "num_beams": 6,
    "num_hidden_layers": 6,
    "pad_token_id": 58100,
    "scale_embedding": True,
    "share_encoder_decoder_embeddings": True,
    "static_position_embeddings": True,
    "torch_dtype": "float16",
    "transformers_version": "4.22.0.dev0",
    "use_cache": True,
    "vocab_size": 58101,
}


def config_of(**fields):
    return config_of_weights(PUBLISHED | fields, "config.json")


def test_a_published_configuration():
    assert config_of() == models.EncoderDecoderConfig(
        vocab_size=58101,
        max_length=512,
        num_layers=6,
        num_decoder_layers=6,
        d_model=512,
        num_heads=8,
        decoder_num_heads=8,
        d_ff=2048,
        decoder_d_ff=2048,
        activation="silu",
        norm_eps=1e-5,
        dropout_rate=0.1,
        attention_bias=True,
        position_layout="halves",
        output_bias=True,
    )


def test_every_field_of_marian_is_read():
    for name, ours, value in (
        ("dropout", "dropout_rate", 0.3),
        ("attention_dropout", "attention_dropout_rate", 0.2),
        ("activation_dropout", "activation_dropout_rate", 0.4),
        ("encoder_ffn_dim", "d_ff", 7),
        ("decoder_ffn_dim", "decoder_d_ff", 7),
        ("encoder_attention_heads", "num_heads", 4),
        ("decoder_attention_heads", "decoder_num_heads", 4),
        ("decoder_layers", "num_decoder_layers", 1),
        ("max_position_embeddings", "max_length", 99),
        ("scale_embedding", "scale_embedding", False),
        ("activation_function", "activation", "relu"),
    ):
        assert config_of(**{name: value}) == dataclasses.replace(config_of(), **{ours: value})
    assert config_of(decoder_vocab_size=None) == config_of()


def test_defaults_are_those_of_transformers():
    whole = transformers.MarianConfig().to_dict()
    assert config_of_weights({"model_type": "marian"}, "") == config_of_weights(whole, "")


REFUSED = {
    "another class": ({"architectures": ["MarianForCausalLM"]}, "a MarianForCausalLM is not"),
    "a decoder": ({"is_decoder": True}, "is_decoder True"),
    "learned positions": (
        {"static_position_embeddings": False},
        "static_position_embeddings False",
    ),
    "norms before": ({"normalize_before": True}, "normalize_before True"),
    "norm of embeddings": ({"normalize_embedding": True}, "normalize_embedding True"),
    "final norms": ({"add_final_layer_norm": True}, "add_final_layer_norm True"),
    "layers dropped": ({"encoder_layerdrop": 0.1}, "encoder_layerdrop 0.1"),
    "activation": ({"activation_function": "mish"}, "activation_function 'mish'"),
    "two numbers of layers": ({"num_hidden_layers": 3}, "num_hidden_layers 3 .* which is 6"),
    "two sizes": ({"decoder_vocab_size": 9}, "decoder_vocab_size 9 is not vocab_size 58101"),
    "a size in words": ({"decoder_vocab_size": "many"}, "decoder_vocab_size 'many'"),
    "unknown": ({"rope_theta": 1.0}, "rope_theta"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_fields_are_refused_by_name(fields, message):
    with pytest.raises(WeightsError, match=f"config.json.*{message}"):
        config_of(**fields)


NOT_MARIAN = {
    "position_base": 1000.0,
    "positions": "learned",
    "positions_at": "projections",
    "position_layout": "per_dimension",
    "norm_eps": 1e-6,
    "d_k": 16,
    "share_embeddings": True,  # with an output of its own
}


@pytest.mark.parametrize("name", NOT_MARIAN)
def test_what_marian_cannot_say_is_refused_with_the_remedy(tmp_path, name):
    settings = {"tie_output": name != "share_embeddings"}
    settings["share_embeddings"] = settings["tie_output"]
    if name == "positions":
        settings["position_layout"] = "interleaved"  # of sinusoidal positions only
    fields = vars(config_of()) | settings | {name: NOT_MARIAN[name]}
    config = models.LectureTransformerConfig(**fields)
    message = rf"marian .*{name} {NOT_MARIAN[name]!r}"
    with pytest.raises(WeightsError, match=message):
        write_weights(tmp_path, config, {})
    assert not list(tmp_path.iterdir())
