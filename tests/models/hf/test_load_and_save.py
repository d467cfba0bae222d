"""Folders in Hugging Face's form: written, read, read in pieces, and broken in many ways."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.encoders.distilbert import DistilBertConfig
from flaxzoo.models.encoders.roberta import RobertaConfig
from flaxzoo.models.hf.encoders import bert
from flaxzoo.models.hf.load_weights import TensorFiles
from flaxzoo.models.hf.registry import mapping_of, mapping_of_type
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.hf.tensors import read
from flaxzoo.models.hf.tensors.layout import LINEAR, VECTOR, Layout
from flaxzoo.models.hf.tensors.mapping import WeightsError
from jax.sharding import NamedSharding
from safetensors.numpy import load_file, save_file

from ...support.broken_folders import BREAKS, CONFIG, WORDS, edit, write


@pytest.fixture(scope="module")
def params():
    model = models.create(CONFIG)
    return jax.jit(lambda: models.init_params(model, jax.random.key(0)))()


@pytest.fixture
def folder(tmp_path, params):
    write(tmp_path, params)
    return tmp_path


def equal(tree, other):
    return jax.tree.all(jax.tree.map(np.array_equal, tree, other))


@pytest.mark.slow
def test_what_is_written_is_read_bit_for_bit(folder, params):
    model, again = models.load(folder)
    assert model.config == CONFIG
    assert equal(again, params)


@pytest.mark.slow
def test_sizes_that_follow_from_others_are_written_out(tmp_path):
    config = models.BertConfig(**{**vars(CONFIG), "d_ff": None})
    write_weights(tmp_path, config, models.init_params(models.create(config), jax.random.key(0)))
    assert json.loads((tmp_path / "config.json").read_text())["intermediate_size"] == 64
    assert models.load(tmp_path)[0].config.feed_forward_dim == 64


def test_several_files_and_their_index(tmp_path, params):
    write_weights(tmp_path, CONFIG, params, file_bytes=8_000)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert all(f"-of-{len(files):05}" in name for name in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(x.size for x in jax.tree.leaves(params))
    assert sorted(set(index["weight_map"].values())) == files
    assert equal(models.load(tmp_path)[1], params)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tmp_path, params, dtype):
    write_weights(tmp_path, CONFIG, params, dtype=dtype)
    _, again = models.load(tmp_path)
    assert equal(again, jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params))
    execution = models.Execution(param_dtype="bfloat16")
    _, half = models.load(tmp_path, execution=execution)
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}


def test_each_device_reads_its_own_piece(folder, params):
    mesh = train.make_mesh(train.MeshConfig(fsdp=8))
    _, sharded = models.load(
        folder, shardings=lambda shapes: train.parameter_shardings(shapes, mesh)
    )
    assert equal(sharded, params)
    up = sharded["layers"]["feed_forward"]["up"]["kernel"]
    assert isinstance(up.sharding, NamedSharding)
    assert {shard.data.shape for shard in up.addressable_shards} == {(2, 2, 48)}


def test_fields_of_searches_say_nothing_of_the_model(folder, params):
    fields = {"max_length": 20, "num_beams": 1, "do_sample": False, "top_k": 50}
    edit("config.json", **fields, task_specific_params={"summarization": {"num_beams": 4}})(folder)
    model, again = models.load(folder)
    assert model.config == CONFIG
    assert equal(again, params)


def test_files_may_change_once_they_are_read(folder, params):
    _, again = models.load(folder)
    file = folder / "model.safetensors"
    with file.open("r+b") as content:
        content.write(bytes(file.stat().st_size))
    assert equal(again, params)


@pytest.mark.parametrize("size", [1, 200, 1000])
def test_blocks_of_any_size(folder, params, monkeypatch, size):
    monkeypatch.setattr(read, "BLOCK", size)
    monkeypatch.setattr(read, "BLOCKS_KEPT", 3)
    assert equal(models.load(folder)[1], params)
    mesh = train.make_mesh(train.MeshConfig(fsdp=2, tensor=4))
    _, sharded = models.load(
        folder, shardings=lambda shapes: train.parameter_shardings(shapes, mesh)
    )
    assert equal(sharded, params)


def test_older_names_missing_prefixes_and_buffers(folder, params):
    file = folder / "model.safetensors"
    tensors = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in load_file(file).items()
    }
    tensors["embeddings.position_ids"] = np.arange(16)[None]
    tensors["pooler.dense.weight"] = np.zeros((16, 16), np.float32)  # the head needs none
    save_file(tensors, file)
    assert equal(models.load(folder)[1], params)


def test_layouts_undo_themselves():
    x = np.arange(24.0)
    parts = [x.reshape(2, 3, 4), x.reshape(2, 3, 4) + 100]
    for layout in (LINEAR, VECTOR, Layout(2), Layout(2, transposed=False)):
        shapes = [part.shape for part in parts]
        joined = layout.join(parts)
        assert joined.shape == layout.hf_shape(shapes)
        for i, part in enumerate(parts):
            np.testing.assert_array_equal(layout.split(joined, i, shapes), part)
    # As torch has it: outputs first.
    np.testing.assert_array_equal(LINEAR.join([x.reshape(4, 6)]), x.reshape(4, 6).T)


@pytest.mark.parametrize(("change", "message"), BREAKS.values(), ids=BREAKS)
def test_broken_folders_are_refused_in_a_line(folder, change, message):
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as refused:
        models.load(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_tied_tensor_that_differs_is_refused(tmp_path):
    config = models.BertConfig(**{**vars(CONFIG), "head": "masked_lm", "labels": ()})
    model = models.create(config)
    write_weights(tmp_path, config, models.init_params(model, jax.random.key(0)))
    file = tmp_path / "model.safetensors"
    tied = load_file(file)[WORDS]
    matrix = "cls.predictions.decoder.weight"
    save_file(load_file(file) | {matrix: tied}, file)
    models.load(tmp_path)
    save_file(load_file(file) | {matrix: tied + 1}, file)
    with pytest.raises(WeightsError, match=f"{matrix} .*{WORDS}.*differs"):
        models.load(tmp_path)


def test_tensors_are_read_one_by_one(folder, monkeypatch):
    """Never more than one tensor of theirs beside what is loaded."""
    read, sizes = TensorFiles.read, []
    monkeypatch.setattr(
        TensorFiles, "read", lambda self, name: sizes.append(name) or read(self, name)
    )
    models.load(folder)
    assert len(sizes) == len(set(sizes)) == len(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize(
    ("architecture", "fields", "rate"),
    [
        ("DistilBertForQuestionAnswering", {"qa_dropout": 0.3}, 0.3),
        ("DistilBertForQuestionAnswering", {}, 0.1),
        ("DistilBertForSequenceClassification", {"qa_dropout": 0.3}, 0.2),
        ("DistilBertForTokenClassification", {"dropout": 0.4}, 0.4),
        ("BertForSequenceClassification", {"classifier_dropout": 0.0}, 0.0),
        ("BertForTokenClassification", {"classifier_dropout": None}, 0.1),
        ("BertForQuestionAnswering", {"classifier_dropout": 0.3}, 0.0),
        ("RobertaForMultipleChoice", {"classifier_dropout": 0.3}, 0.1),
        ("AlbertForQuestionAnswering", {"classifier_dropout_prob": 0.3}, 0.0),
        ("AlbertForTokenClassification", {}, 0.1),
    ],
)
def test_dropout_of_what_a_head_scores_is_honored(architecture, fields, rate):
    family = architecture.split("For")[0].lower()
    theirs = {"model_type": family, "architectures": [architecture], **fields}
    mapping = mapping_of_type(family, "here")
    config = mapping.config_from_hf(theirs, "here")
    assert config.classifier_dropout_rate == rate
    assert mapping.config_from_hf(mapping.config_to_hf(config), "here") == config


def test_a_dropout_that_is_none_is_refused():
    theirs = {"model_type": "bert", "architectures": ["BertForTokenClassification"]}
    with pytest.raises(WeightsError, match="classifier_dropout 'much'"):
        bert.FORM.config_from_hf(theirs | {"classifier_dropout": "much"}, "here")


@pytest.mark.parametrize(
    ("architecture", "is_decoder"),
    [
        ("BertModel", True),
        ("BertForMaskedLM", True),
        ("BertLMHeadModel", False),
        ("RobertaForCausalLM", None),
    ],
)
def test_a_decoder_that_is_none_is_refused(architecture, is_decoder):
    family = "roberta" if architecture.startswith("Roberta") else "bert"
    theirs = {"model_type": family, "architectures": [architecture]}
    if is_decoder is not None:
        theirs["is_decoder"] = is_decoder
    with pytest.raises(WeightsError, match=r"is_decoder (True|False) "):
        mapping_of_type(family, "here").config_from_hf(theirs, "here")


@pytest.mark.slow
def test_a_body_saved_without_its_pooler_has_none(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8,
    )  # fmt: skip
    theirs = transformers.BertModel(config, add_pooling_layer=False).eval()
    theirs.save_pretrained(tmp_path)
    model, params = models.load(tmp_path)
    ids = np.arange(12).reshape(2, 6)
    output = model.apply({"params": params}, ids)
    assert output.pooler_output is None
    expected = theirs(torch.from_numpy(ids)).last_hidden_state.detach().numpy()
    np.testing.assert_allclose(output.last_hidden_state, expected, atol=1e-5)
    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", model.config, params)
    again = transformers.BertModel.from_pretrained(tmp_path / "ours", add_pooling_layer=False)
    assert models.load(tmp_path / "ours")[0].config == model.config
    assert again.state_dict().keys() == theirs.state_dict().keys()


SMALL = {"vocab_size": 16, "max_length": 8, "num_layers": 1, "d_model": 8, "num_heads": 2}
UNSAYABLE = {
    "no token types": models.BertConfig(**SMALL, num_token_types=0),
    "computed positions": models.BertConfig(**SMALL, positions="sinusoidal"),
    "positions in every layer": models.LectureBertConfig(**SMALL, positions_at="every_layer"),
    "another epsilon": DistilBertConfig(**SMALL, norm_eps=1e-3),
    "positions from 0": RobertaConfig(**SMALL, position_offset=0),
}


@pytest.mark.parametrize("config", UNSAYABLE.values(), ids=UNSAYABLE)
def test_what_no_encoder_can_say_is_refused(config):
    with pytest.raises(WeightsError, match=r"(bert|distilbert|roberta) has no"):
        mapping_of(config).config_to_hf(config)


@pytest.mark.slow
def test_a_special_token_that_contradicts_the_model_is_refused(tmp_path):
    config = RobertaConfig(**SMALL, head="question_answering")
    params = models.init_params(models.create(config), jax.random.key(0))
    with pytest.raises(WeightsError, match=r"pad_token_id .*1 .* 0 "):
        write_weights(tmp_path, config, params, fields={"pad_token_id": 0})
    write_weights(tmp_path, config, params, fields={"pad_token_id": None, "eos_token_id": 2})
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["pad_token_id"], fields["eos_token_id"]) == (1, 2)


def test_numbers_beyond_float16_are_refused(tmp_path):
    config = models.BertConfig(**SMALL, head="question_answering")
    params = models.init_params(models.create(config), jax.random.key(0))
    params["head"]["span"]["kernel"] = params["head"]["span"]["kernel"] + 1e6
    with pytest.raises(WeightsError, match=r"qa_outputs\.weight .*float16"):
        write_weights(tmp_path, config, params, dtype="float16")
    write_weights(tmp_path, config, params, dtype="bfloat16")
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644
