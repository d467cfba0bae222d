"""A folder in Hugging Face's form as a run folder."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data import load_tokenizer
from flaxzoo.data.huggingface_tokenizer import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.weights.writing import write_weights
from flaxzoo.train.cli import main
from flaxzoo.train.importing import import_model

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
    vectors = train.TextEmbedder.of_run(tmp_path / "run")(["the cat", "sat"])
    assert vectors.shape == (2, 16)


def test_others_begin_with_it_and_it_is_not_trained_on(tmp_path, theirs, params):
    import_model(theirs, tmp_path / "run")
    (tmp_path / "data.tsv").write_text("good\tthe cat\nbad\tsat\n" * 16)
    config = train.recipe("bert-classify")
    data = dataclasses.replace(
        config.data, source=f"tsv:{tmp_path / 'data.tsv'}", validation_fraction=0.5, length=8
    )
    config = dataclasses.replace(
        config, data=data, steps=1, epochs=0.0, batch_size=8, init_from=str(tmp_path / "run")
    )
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, frozen=("layers",))
    )
    train.train(config, tmp_path / "tuned")
    model, tuned = models.load(tmp_path / "tuned")
    assert (model.config.head, model.config.labels) == ("sequence", ("bad", "good"))
    assert jax.tree.all(jax.tree.map(np.array_equal, tuned["layers"], params["layers"]))
    with pytest.raises(train.RunError, match=r"an imported model.* begin it with --init-from"):
        train.train(config, tmp_path / "run")


def test_a_tokenizer_of_another_model_is_refused(tmp_path, theirs):
    wordpiece([*WORDS, *"abcdefgh"], lowercase=True).save(theirs)
    with pytest.raises(train.RunError, match="has 19 tokens, more than the 16 of its model"):
        import_model(theirs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "has neither model.safetensors"),
        ("config.json", "has no config.json"),
    ],
)
def test_nothing_is_left_of_a_broken_folder(tmp_path, theirs, name, message):
    (theirs / name).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        import_model(theirs, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_place_that_is_taken_is_refused(tmp_path, theirs):
    (tmp_path / "run").mkdir()
    with pytest.raises(train.RunError, match="run exists: give a folder that does not"):
        import_model(theirs, tmp_path / "run")


def test_the_folder_says_where_it_is_from(tmp_path, theirs):
    import_model(theirs, tmp_path / "run")
    fields = json.loads((tmp_path / "run" / "config.json").read_text())
    assert fields["imported_from"] == str(theirs.resolve())


def test_the_command(tmp_path, theirs, capsys):
    assert main(["import", str(theirs), str(tmp_path / "run")]) == 0
    assert f"{tmp_path / 'run'}: bert, head none, " in capsys.readouterr().err
    assert main(["import", str(tmp_path / "nowhere"), str(tmp_path / "new")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
