"""The configuration in config.json."""

import importlib.metadata
import json
import math

import pytest
from flaxzoo import models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.train.config import to_dict
from flaxzoo.train.runs.config_json import from_dict
from flaxzoo.train.runs.load_run import config_of_run

from ...support.run_folders import small_run

VALID = json.loads(json.dumps(to_dict(train.recipe("bert-classify"))))


def test_a_configuration_survives_json():
    assert from_dict(VALID) == train.recipe("bert-classify")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {**VALID["data"], "kind": "clasify"}}, "'clasify'"),
        ({"data": {**VALID["data"], "stride": 3}}, "unknown field data.stride"),
        ({"speed": 3}, "unknown field speed"),
        ({"mesh": {"data": 1, "stages": 2}}, "unknown field mesh.stages"),
        ({"mesh": 3}, "mesh must .* 3"),
        ({"data": []}, r"data \[\] .*object"),
        ({"model": "bert"}, "model 'bert' .*object"),
        ({"steps": "10"}, "steps must .*'10'"),
        ({"steps": True}, "steps must .*True"),
        ({"steps": 1.5}, r"steps must .*1\.5"),
        ({"steps": 10**30}, "steps must .*1000"),
        ({"epochs": math.nan}, "epochs must .*nan"),
        ({"init_from": 3}, "init_from must .*3"),
        ({"init_from": {}}, "init_from must .*{}"),
        ({"parallel": "both"}, "parallel must .*'both'"),
        ({"parallel": 1}, "parallel must .*1"),
        ({"model": {**VALID["model"], "d_model": "128"}}, "d_model"),
        ({"model": {**VALID["model"], "d_model": None}}, "d_model"),
        ({"model": {**VALID["model"], "d_model": [128]}}, "d_model"),
        ({"model": {**VALID["model"], "labels": "good"}}, "labels"),
        ({"model": {**VALID["model"], "labels": [1, 2]}}, "labels"),
        ({"model": {**VALID["model"], "norm_eps": "small"}}, "norm_eps"),
        ({"model": {**VALID["model"], "architecture": ["bert"]}}, "architecture"),
        ({"data": {**VALID["data"], "tokenizer": None}}, r"data\.tokenizer must .*None"),
        ({"data": {**VALID["data"], "tokenizer": {"kind": "bytes"}}}, "kind must .*'bytes'"),
        ({"data": {**VALID["data"], "length": "64"}}, r"data\.length must .*'64'"),
        ({"model": {**VALID["model"], "rope": 3}}, "unknown field rope"),
    ],
)
def test_unknown_names_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        from_dict({**VALID, **change})


def test_a_field_that_must_be_there_is_named():
    fields = {name: value for name, value in VALID.items() if name != "batch_size"}
    with pytest.raises(UserError, match=r"batch_size .*missing"):
        from_dict(fields)


OWN = importlib.metadata.version("flaxzoo")
WRITERS = [
    ("9.1", ["flaxzoo 9.1", OWN, "use flaxzoo 9.1"]),
    (OWN, [OWN, "restore it"]),
    (None, [OWN, "restore it"]),
]


@pytest.mark.parametrize(("writer", "remedy"), WRITERS)
@pytest.mark.parametrize(
    ("train_fields", "model_fields", "problem"),
    [
        ({"speed": 3}, {}, "unknown field speed"),
        ({}, {"rope": 3}, "unknown field rope"),
    ],
)
def test_an_error_of_the_file_names_its_version(
    tmp_path, writer, remedy, train_fields, model_fields, problem
):
    train_config = {name: value for name, value in VALID.items() if name != "model"}
    content = {"model": {**VALID["model"], **model_fields}, "train": train_config | train_fields}
    if writer is not None:
        content["flaxzoo"] = writer
    (tmp_path / "config.json").write_text(json.dumps(content))
    expected = [f"{tmp_path}/config.json", problem, *remedy]
    with pytest.raises(UserError) as caught:
        config_of_run(tmp_path)
    assert all(part in str(caught.value) for part in expected)
    if model_fields:
        with pytest.raises(UserError) as caught:
            models.load(tmp_path)
        assert all(part in str(caught.value) for part in expected)


@pytest.mark.slow
def test_a_run_of_another_version_continues_with_a_warning(tmp_path, capsys, on_one_device):
    config = small_run(tmp_path, steps=4, evaluate_every=4, checkpoint_every=4)
    train.train(config, tmp_path / "run", quiet=True)
    file = tmp_path / "run" / "config.json"
    content = json.loads(file.read_text())
    assert content["flaxzoo"] == OWN
    for writer, warns in (("0.0.9", True), (OWN, False), (None, False)):
        changed = {**content, "flaxzoo": writer}
        if writer is None:
            del changed["flaxzoo"]
        file.write_text(json.dumps(changed))
        assert train.train(config, tmp_path / "run").finished
        assert ("flaxzoo 0.0.9" in capsys.readouterr().err) == warns
