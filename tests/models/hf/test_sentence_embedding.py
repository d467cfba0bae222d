"""Settings of sentence vectors: what is read is written again, and what is unknown is refused."""

import json
import re

import numpy as np
import pytest
from flaxzoo.models.hf.sentence_embedding import (
    Dense,
    EmbeddingSettings,
    Normalize,
    read_embedding_settings,
    write_embedding_settings,
)
from flaxzoo.models.hf.tensors.mapping import WeightsError

SETTINGS = EmbeddingSettings(
    pooling=("lasttoken", "mean"),
    layers=(Dense(np.ones((8, 3), np.float32), np.ones(3, np.float32), "ReLU"), Normalize()),
    num_dimensions=2,
    max_length=7,
    lowercase=True,
    prompts={"query": "q: "},
    default_prompt="query",
    pool_prompt=False,
    similarity="dot",
)


def test_what_is_written_is_read(tmp_path):
    write_embedding_settings(tmp_path, SETTINGS, d_model=4, max_length=9)
    again = read_embedding_settings(tmp_path)
    assert again is not None
    assert vars(again) | {"layers": ()} == vars(SETTINGS) | {"layers": ()}
    dense, normalize = again.layers
    assert isinstance(dense, Dense)
    assert (dense.kernel.shape, dense.activation, normalize) == ((8, 3), "ReLU", Normalize())
    assert again.width(4) == 2
    assert read_embedding_settings(tmp_path / "2_Dense") is None


def changed(folder, file, **fields):
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | fields))


def module(folder, number, **fields):
    content = json.loads((folder / "modules.json").read_text())
    content[number] |= fields
    (folder / "modules.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: module(f, 2, type="sentence_transformers.models.LSTM"),
         "modules.json: the"),
        (lambda f: module(f, 1, type="custom.Pooling"), "Transformer, custom.Pooling"),
        (lambda f: (f / "modules.json").write_text("[]"), "nothing, nothing"),
        (lambda f: module(f, 0, path="0_Transformer"), "0_Transformer"),
        (lambda f: (f / "1_Pooling/config.json").unlink(), "1_Pooling/config.json .*read"),
        (lambda f: changed(f, "1_Pooling/config.json", pooling_mode="median"),
         r"1_Pooling/config.json: pooling_mode \['median'\] .*cls"),
        (lambda f: changed(f, "1_Pooling/config.json", more=1), "fields: more"),
        (lambda f: changed(f, "2_Dense/config.json", use_residual=True), "use_residual True"),
        (lambda f: changed(f, "2_Dense/config.json", activation_function="x.Tanh"),
         "activation_function x.Tanh"),
        (lambda f: (f / "2_Dense/model.safetensors").rename(f / "2_Dense/pytorch_model.bin"),
         "2_Dense .*pickled"),
        (lambda f: changed(f, "sentence_bert_config.json", transformer_task="fill-mask"),
         "transformer_task 'fill-mask'"),
        (lambda f: changed(f, "config_sentence_transformers.json", model_type="MultiVectorEncoder"),
         "model_type 'MultiVectorEncoder'"),
        (lambda f: changed(f, "config_sentence_transformers.json", default_prompt_name="x"),
         "'x' .*prompt"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, message):
    write_embedding_settings(tmp_path, SETTINGS, d_model=4, max_length=9)
    change(tmp_path)
    with pytest.raises(WeightsError, match=message) as error:
        read_embedding_settings(tmp_path)
    assert not re.search("\n", str(error.value))


def test_a_folder_of_a_cross_encoder_makes_no_vectors(tmp_path):
    """Version 6 of the package writes its files for these, too."""
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    modules = [{"idx": 0, "name": "0", "path": "", "type": kind}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    whole = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(whole))
    assert read_embedding_settings(tmp_path) is None


@pytest.mark.parametrize("path", ["../1_Pooling", "/dev", "1_Pooling/../../x", "out"])
def test_modules_lie_in_the_folder(tmp_path, path):
    folder = tmp_path / "folder"
    write_embedding_settings(folder, SETTINGS, d_model=4, max_length=9)
    (folder / "out").symlink_to(tmp_path)
    module(folder, 1, path=path)
    with pytest.raises(WeightsError, match=r"modules\.json points"):
        read_embedding_settings(folder)
