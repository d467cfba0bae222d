"""`models.save`: the folder that `flaxzoo export` writes, from a model in memory."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from flaxzoo import data, models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.registry import families

from ...support.encoders import WORDS

SIZES = {"max_length": 32, "num_layers": 2, "d_model": 16, "num_heads": 2}
TEXTS = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(19)]


@pytest.fixture(scope="module")
def gpt():
    model = models.create(models.GPTConfig(vocab_size=290, **SIZES))
    tokenizer = data.train_tokenizer(TEXTS, data.TokenizerConfig(kind="byte-bpe", vocab_size=290))
    return model, models.init_params(model, jax.random.key(3)), tokenizer


def same(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)
    return True


@pytest.mark.slow
def test_saved_models_load_with_and_without_a_tokenizer(gpt, tmp_path):
    model, params, tokenizer = gpt
    for name, given in (("with", [tokenizer]), ("without", [])):
        models.save(tmp_path / name, model, params, *given)
        again, back = models.load(tmp_path / name)
        assert again.config == model.config
        assert same(back, params)
    assert data.load_tokenizer(tmp_path / "with").fingerprint == tokenizer.fingerprint
    assert {p.name for p in (tmp_path / "without").iterdir()} == {
        "config.json",
        "model.safetensors",
    }


def test_it_writes_the_files_that_export_writes(gpt, tmp_path):
    train.save_run(tmp_path / "run", *gpt)
    notes = train.export_model(tmp_path / "run", tmp_path / "exported")
    assert models.save(tmp_path / "saved", *gpt) == notes
    exported, saved = (
        {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        for folder in (tmp_path / "exported", tmp_path / "saved")
    )
    del exported[Path("README.md")]
    assert exported == saved
    pooling = json.loads(saved[Path("1_Pooling/config.json")])
    assert pooling["pooling_mode_mean_tokens"] is True
    assert Path("modules.json") in saved


def test_a_family_without_a_hugging_face_file_has_other_forms(gpt, tmp_path, monkeypatch):
    record = dataclasses.replace(families()["gpt"], hf_module=None)
    monkeypatch.setitem(families(), "gpt", record)
    train.save_run(tmp_path / "run", *gpt)
    with pytest.raises(UserError, match=r"gpt .*safetensors"):
        train.export_model(tmp_path / "run", tmp_path / "folder")
    for form in ("safetensors", "npz", "stablehlo"):
        train.export_model(tmp_path / "run", tmp_path / form, form=form)
        assert (tmp_path / form).is_dir() == (form == "stablehlo")


def test_transformers_reads_it(gpt, tmp_path):
    models.save(tmp_path / "saved", *gpt)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert sum(p.numel() for p in theirs.parameters()) == train.count_parameters(gpt[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer("the cat")["input_ids"] == gpt[2].encode("the cat")


def test_generation_settings_go_with_it(gpt, tmp_path):
    models.save(tmp_path / "a", *gpt, generation={"num_beams": 3, "length_penalty": 0.5})
    stored = models.generation_arguments(tmp_path / "a")
    assert (stored["num_beams"], stored["length_penalty"]) == (3, 0.5)
    models.save(tmp_path / "b", *gpt, generation=stored, dtype="bfloat16")
    assert models.generation_arguments(tmp_path / "b") == stored


def test_the_ids_of_generation_come_before_those_of_the_tokenizer(gpt, tmp_path):
    model, params, tokenizer = gpt
    models.save(tmp_path / "theirs", model, params, tokenizer)
    ends = {"bos_token_id": 5, "eos_token_id": [7, 9]}
    assert tokenizer.special_ids.eos not in (7, 9)
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / "theirs" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **ends}))
    train.import_model(tmp_path / "theirs", tmp_path / "run")
    train.export_model(tmp_path / "run", tmp_path / "back")
    for name in ("config.json", "generation_config.json"):
        back = json.loads((tmp_path / "back" / name).read_text())
        assert {key: back[key] for key in ends} == ends


@pytest.mark.slow
def test_a_classifier_without_padding_reads_one_text_at_a_time_in_transformers(gpt, tmp_path):
    config = dataclasses.replace(gpt[0].config, head="sequence_classification", labels=("a", "b"))
    model = models.create(config)
    params = models.init_params(model, jax.random.key(1))
    notes = models.save(tmp_path / "saved", model, params, gpt[2])
    assert any("padding token" in note and "one text at a time" in note for note in notes)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    ids = [gpt[2].encode("the cat")]
    with pytest.raises(ValueError, match="padding"):
        theirs(torch.tensor(ids * 2))
    expected = theirs(torch.tensor(ids)).logits.detach()
    found = model.apply({"params": params}, np.asarray(ids)).logits
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_activation_and_the_pooling_of_a_classifier_are_kept(tmp_path):
    config = transformers.ModernBertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, classifier_pooling="mean",
        pad_token_id=0,
    )  # fmt: skip
    transformers.ModernBertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    body = models.load(tmp_path / "masked")[0].config
    assert body.pooling == "mean"
    assert not body.has_pooler
    model = models.create(body.with_head("sequence_classification", ("a", "b")))
    params = models.init_params(model, jax.random.key(0))
    kind = "multi_label_classification"
    models.save(tmp_path / "saved", model, params, problem_type=kind)
    written = json.loads((tmp_path / "saved/config.json").read_text(encoding="utf-8"))
    assert (written["problem_type"], written["classifier_pooling"]) == (kind, "mean")


def test_a_folder_that_is_not_empty_is_unchanged(gpt, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"exists .*empty"):
        models.save(tmp_path, *gpt)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
