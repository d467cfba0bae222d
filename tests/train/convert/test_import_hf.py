"""A folder in Hugging Face's form as a run folder."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data import load_tokenizer
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.encoders.distilbert import DistilBertConfig
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.train.cli.main import main
from flaxzoo.train.convert.export import export_model
from flaxzoo.train.convert.import_hf import import_model

from ...support import broken_folders
from ...support.broken_folders import BREAKS

pytestmark = pytest.mark.usefixtures("on_one_device")

WORDS = [*WORDPIECE_SPECIALS, "the", "cat", "sat", "##s", "good", "bad"]
CONFIG = models.BertConfig(
    vocab_size=16, max_length=32, num_layers=2, d_model=16, num_heads=2, d_ff=32, head="none"
)


@pytest.fixture(scope="module")
def params():
    return models.init_params(models.create(CONFIG), jax.random.key(0))


@pytest.fixture
def theirs(tmp_path, params):
    folder = tmp_path / "theirs"
    folder.mkdir()
    write_weights(folder, CONFIG, params)
    wordpiece(WORDS, lowercase=True).save(folder)
    return folder


def test_the_run_is_the_model(tmp_path, theirs, params):
    assert import_model(theirs, tmp_path / "run").startswith("bert, head none, ")
    model, again = models.load(tmp_path / "run")
    assert model.config == CONFIG
    assert jax.tree.all(jax.tree.map(np.array_equal, again, params))
    _, tokenizer = train.open_run(tmp_path / "run")
    assert tokenizer.encode("The cats") == load_tokenizer(theirs).encode("The cats")
    vectors = models.TextEmbedder.of_run(tmp_path / "run")(["the cat", "sat"])
    assert vectors.shape == (2, 16)


def classifying(work_folder, init_from):
    """A step of fine-tuning, in which the layers stay as they are."""
    (work_folder / "data.tsv").write_text("good\tthe cat\nbad\tsat\n" * 16)
    config = train.recipe("bert-classify")
    data = dataclasses.replace(
        config.data, source=f"tsv:{work_folder / 'data.tsv'}", validation_fraction=0.5, length=8
    )
    optimizer = dataclasses.replace(config.optimizer, frozen=("layers",))
    steps = {"steps": 1, "epochs": 0.0, "batch_size": 8}
    return dataclasses.replace(
        config, data=data, optimizer=optimizer, **steps, init_from=str(init_from)
    )


@pytest.mark.slow
def test_others_begin_with_it_and_it_is_not_trained_on(tmp_path, theirs, params):
    import_model(theirs, tmp_path / "run")
    config = classifying(tmp_path, tmp_path / "run")
    train.train(config, tmp_path / "tuned")
    model, tuned = models.load(tmp_path / "tuned")
    assert (model.config.head, model.config.labels) == ("sequence_classification", ("bad", "good"))
    assert jax.tree.all(jax.tree.map(np.array_equal, tuned["layers"], params["layers"]))
    with pytest.raises(train.RunError, match=r"imported model.*--init-from"):
        train.train(config, tmp_path / "run")


@pytest.mark.slow
def test_a_body_without_a_pooler_is_fine_tuned_from_its_folder_and_exported(tmp_path):
    body = DistilBertConfig(
        vocab_size=16, max_length=32, num_layers=2, d_model=16, num_heads=2, head="none"
    )
    params = models.init_params(models.create(body), jax.random.key(0))
    (tmp_path / "distil").mkdir()
    write_weights(tmp_path / "distil", body, params)
    wordpiece(WORDS, lowercase=True).save(tmp_path / "distil")
    config = classifying(tmp_path, tmp_path / "distil")
    for _ in range(2):  # the second finds it done
        assert train.train(config, tmp_path / "tuned").finished
    export_model(tmp_path / "tuned", tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["architectures"] == ["DistilBertForSequenceClassification"]
    _, tuned = models.load(tmp_path / "out")
    assert jax.tree.all(jax.tree.map(np.array_equal, tuned["layers"], params["layers"]))


def test_a_tokenizer_of_another_model_is_refused(tmp_path, theirs):
    wordpiece([*WORDS, *"abcdefgh"], lowercase=True).save(theirs)
    with pytest.raises(train.RunError, match=r"19 tokens.* 16 "):
        import_model(theirs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def tagger():
    return models.init_params(models.create(broken_folders.CONFIG), jax.random.key(0))


def test_a_whole_folder_is_imported(tmp_path, tagger):
    broken_folders.write(tmp_path, tagger)
    assert main(["import", str(tmp_path), str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    ("change", "message"), [BREAKS[name] for name in ("no config", "truncated", "lacking")]
)
def test_a_broken_folder_is_one_line_without_output(tmp_path, tagger, capsys, change, message):
    (tmp_path / "theirs").mkdir()
    broken_folders.write(tmp_path / "theirs", tagger)
    change(tmp_path / "theirs")
    files = sorted(tmp_path.rglob("*"))
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "run")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(f"flaxzoo: .*{message}", line)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_place_that_is_taken_is_refused(tmp_path, theirs):
    (tmp_path / "run").mkdir()
    with pytest.raises(train.RunError, match="run exists"):
        import_model(theirs, tmp_path / "run")


def test_the_folder_names_its_source(tmp_path, theirs):
    import_model(theirs, tmp_path / "run")
    fields = json.loads((tmp_path / "run" / "config.json").read_text())
    assert fields["imported_from"] == str(theirs.resolve())


def test_the_command(tmp_path, theirs, capsys):
    assert main(["import", str(theirs), str(tmp_path / "run")]) == 0
    assert f"{tmp_path / 'run'}: bert, head none, " in capsys.readouterr().err
    assert main(["import", str(tmp_path / "nowhere"), str(tmp_path / "new")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "THEIRS"], "validation data"),
        (["predict", "THEIRS", "--input", "none.txt"], "no head .*predict"),
        (["generate", "THEIRS"], "command embed"),
        (["translate", "THEIRS", "--input", "none.txt"], "head none cannot translate"),
        (["export", "THEIRS", "OUT", "--file-gb", "inf"], "file-gb .*finite"),
        (["export", "THEIRS", "OUT", "--form", "npz", "--file-gb", "1"], "file-gb "),
        (["export", "THEIRS", "OUT", "--form", "npz", "--dtype", "bfloat16"], "npz .*bfloat"),
        (["export", "FILE", "OUT"], "config.json .*no folder"),
        (["export", "NOWHERE", "OUT"], "NOWHERE .*exist"),
        (["import", "THEIRS", "THEIRS"], "exists"),
    ],
)
def test_a_wrong_command_is_one_line_without_output(tmp_path, theirs, capsys, arguments, message):
    places = {"THEIRS": str(theirs), "OUT": str(tmp_path / "out"), "NOWHERE": "./NOWHERE"}
    places["FILE"] = str(theirs / "config.json")
    assert main([places.get(word, word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flaxzoo: ")
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
