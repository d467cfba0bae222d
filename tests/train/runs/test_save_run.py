"""A model that was trained by hand, saved as a run folder: every command takes it."""

import json

import jax
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.tasks.translation import encode_source
from flaxzoo.train.cli.main import main
from flaxzoo.train.runs.run_folder import prepare_run

from ...support.encoders import KINDS, VOCABULARY, WORDS, fine_tuning
from ...support.marian_tokenizer import WORTE, train_model, write_folder

pytestmark = pytest.mark.usefixtures("on_one_device")
SIZES = {"max_length": 32, "num_layers": 2, "d_model": 16, "num_heads": 2}
TEXTS = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(19)]


def made(config):
    model = models.create(config)
    return model, models.init_params(model, jax.random.key(3))


@pytest.fixture(scope="module")
def wordpiece():
    return data.train_tokenizer(TEXTS, VOCABULARY)


@pytest.fixture(scope="module")
def byte_bpe():
    return data.train_tokenizer(TEXTS, data.TokenizerConfig(kind="byte-bpe", vocab_size=290))


@pytest.fixture(scope="module")
def gpt(byte_bpe):
    return *made(models.GPTConfig(vocab_size=290, **SIZES)), byte_bpe


def same(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)
    return True


def run(capsys, *arguments):
    assert main([str(x) for x in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_gpt_comes_back_and_is_taken_by_the_commands(gpt, tmp_path, capsys):
    model, params, tokenizer = gpt
    folder = tmp_path / "mine"
    train.save_run(folder, model, params, tokenizer, step=12)
    again, back = models.load(folder, step=12)
    assert again.config == model.config
    assert same(back, params)
    assert train.open_run(folder)[1].fingerprint == tokenizer.fingerprint
    assert (folder / "checkpoints" / "12" / "checksums.json").is_file()
    run(capsys, "generate", folder, "--prompt", "the cat", "--max-new-tokens", 3)
    run(capsys, "average", folder, "--last", 1, "--output", tmp_path / "averaged")
    run(capsys, "export", folder, tmp_path / "out")
    assert same(models.load(tmp_path / "averaged")[1], params)
    assert same(models.load(tmp_path / "out")[1], params)
    assert "Saved by flaxzoo" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_commands_read_more_tokens_than_in_training(gpt, byte_bpe, tmp_path, capsys):
    """`--max-length` beyond `max_length`, unless the positions are a table that ends there."""
    train.save_run(tmp_path / "table", *gpt)
    config = models.GPTConfig(vocab_size=290, positions="sinusoidal", **SIZES)
    train.save_run(tmp_path / "waves", *made(config), byte_bpe)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS))
    options = ["--data", f"text:{text}", "--max-length"]
    losses = [
        json.loads(run(capsys, "evaluate", tmp_path / "waves", *options, length))
        for length in (32, 48)
    ]
    assert losses[0]["loss"] != losses[1]["loss"]
    prompt = "a text of more than thirty-two bytes: " * 2
    arguments = ["generate", tmp_path / "waves", "--prompt", prompt, "--max-new-tokens", 2]
    assert main([str(x) for x in arguments]) == 0
    assert "32 tokens" in capsys.readouterr().err
    assert main([str(x) for x in [*arguments, "--max-length", 80]]) == 0
    assert "exceed" not in capsys.readouterr().err
    scored = ["score", tmp_path / "waves", "--text", prompt, "--json", "--max-length", 80]
    assert json.loads(run(capsys, *scored))["each"]
    for command in (["evaluate", *options], ["generate", "--max-length"]):
        arguments = [command[0], tmp_path / "table", *command[1:], 48]
        assert main([str(x) for x in arguments]) == 2
        assert "--max-length 48 " in capsys.readouterr().err


def test_a_run_is_initialized_from_it_and_cannot_resume_it(gpt, tmp_path, train_config):
    train.save_run(tmp_path / "mine", *gpt)
    config = train_config(init_from=str(tmp_path / "mine"))
    plan = prepare_run(config, tmp_path / "next", lambda line: None).init_from
    assert plan is not None
    assert len(plan.copied) == len(jax.tree.leaves(gpt[1]))
    with pytest.raises(train.RunError, match="saved from Python"):
        train.train(config, tmp_path / "mine")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "several", "score", "tag"])
def test_heads_with_labels(wordpiece, work_folder, tmp_path, capsys, kind):
    settings = fine_tuning(work_folder, kind).data
    labels = settings.labels()
    config = models.BertConfig(vocab_size=wordpiece.vocab_size, **SIZES)
    model, params = made(config.with_head(KINDS[kind][0].kind, labels))
    train.save_run(tmp_path / "mine", model, params, wordpiece, data=settings)
    (tmp_path / "in.txt").write_text("the cat sat\n")
    predicted = json.loads(
        run(capsys, "predict", tmp_path / "mine", "--input", tmp_path / "in.txt")
    )
    assert {"one": "label", "several": "labels", "score": "score", "tag": "tags"}[kind] in predicted
    scores = json.loads(run(capsys, "evaluate", tmp_path / "mine"))
    assert np.isfinite(scores["loss"])
    run(capsys, "embed", tmp_path / "mine", "--input", tmp_path / "in.txt", "--output",
        tmp_path / "vectors.npy")  # fmt: skip


@pytest.mark.slow
def test_masks_are_filled_and_unknown_data_are_not_evaluated(wordpiece, tmp_path, capsys):
    model, params = made(
        models.BertConfig(vocab_size=wordpiece.vocab_size, **SIZES, head="masked_lm")
    )
    train.save_run(tmp_path / "mine", model, params, wordpiece)
    run(capsys, "fill-mask", tmp_path / "mine", "the [MASK] sat")
    assert main(["evaluate", str(tmp_path / "mine")]) == 2
    assert "name the data" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True])
def test_a_translation_model_and_the_two_sides_of_its_tokenizer(tmp_path, capsys, separate):
    sides = [train_model([" ".join(words)] * 9, 60) for words in (TEXTS[0].split(), WORTE)]
    tokenizer = data.load_tokenizer(write_folder(tmp_path / "marian", sides, separate))
    sizes = {"vocab_size": tokenizer.target.vocab_size}
    if separate:
        sizes |= {"source_vocab_size": tokenizer.vocab_size, "share_embeddings": False}
    model, params = made(
        models.EncoderDecoderConfig(**sizes, max_length=32, num_layers=1, d_model=16, num_heads=2)
    )
    train.save_run(tmp_path / "mine", model, params, tokenizer)
    again, back = models.load(tmp_path / "mine")
    assert again.config == model.config
    assert same(back, params)
    loaded = train.open_run(tmp_path / "mine")[1]
    assert encode_source(loaded, "the cat") == encode_source(tokenizer, "the cat")
    assert loaded.target.fingerprint == tokenizer.target.fingerprint
    (tmp_path / "in.txt").write_text("the cat\n")
    run(capsys, "translate", tmp_path / "mine", "--input", tmp_path / "in.txt",
        "--output", tmp_path / "out.txt")  # fmt: skip
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 1


def test_an_empty_folder_is_taken_and_one_that_holds_something_is_left_alone(gpt, tmp_path):
    (tmp_path / "empty").mkdir()
    train.save_run(tmp_path / "empty", *gpt)
    models.load(tmp_path / "empty")
    with pytest.raises(UserError, match="empty exists"):
        train.save_run(tmp_path / "empty", *gpt)


def test_nothing_is_left_of_a_folder_that_fails(gpt, tmp_path, monkeypatch):
    monkeypatch.setattr(type(gpt[2]), "save", lambda self, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.save_run(tmp_path / "mine", *gpt)
    assert not any(tmp_path.iterdir())


def without(params, key):
    return {name: x for name, x in params.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"params": p}, r'params\["params"\]'),
        (lambda p: without(p, "layers"), r"no layers/attention/key/bias \(2, "),
        (lambda p: p | {"extra": np.zeros(3)}, "extra, .*model"),
        (lambda p: p | {"layers": 3.0}, "has layers, which|has no layers/"),
        (
            lambda p: p | {"token_embedding": {"embedding": np.zeros((5, 16), np.float32)}},
            r"token_embedding/embedding \(5, 16\) .*\(290, 16\)",
        ),
        (
            lambda p: p | {"token_embedding": {"embedding": np.zeros((290, 16), int)}},
            "token_embedding/embedding .*int64",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_named(gpt, tmp_path, change, message):
    model, params, tokenizer = gpt
    for save in (train.save_run, models.save):
        with pytest.raises(UserError, match=message):
            save(tmp_path / "mine", model, change(params), tokenizer)
    assert not any(tmp_path.iterdir())


def test_parameters_that_are_not_finite_are_refused(gpt, tmp_path):
    model, params, tokenizer = gpt
    bad = params | {"token_embedding": {"embedding": np.full((290, 16), np.nan, np.float32)}}
    with pytest.raises(UserError, match=r"NaN .*1 .*token_embedding/embedding"):
        train.save_run(tmp_path / "mine", model, bad, tokenizer)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_half_precision_is_stored_as_float32(gpt, tmp_path):
    model, params, tokenizer = gpt
    half = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    train.save_run(tmp_path / "mine", model, half, tokenizer)
    assert same(models.load(tmp_path / "mine")[1], jax.tree.map(np.float32, half))


def test_layers_for_decoding_are_refused(gpt, tmp_path):
    model, params = models.unstack_layers(*gpt[:2])
    with pytest.raises(UserError, match="before unstack_layers"):
        train.save_run(tmp_path / "mine", model, params, gpt[2])


@pytest.mark.slow
def test_a_tokenizer_of_another_size_is_refused(gpt, wordpiece, tmp_path):
    small = made(models.GPTConfig(vocab_size=48, **SIZES))
    with pytest.raises(UserError, match=r"290 tokens.* 48 "):
        train.save_run(tmp_path / "mine", *small, gpt[2])
    with pytest.raises(UserError, match=r"290 tokens.* 48 "):
        models.save(tmp_path / "mine", *small, gpt[2])


def test_data_of_another_head_are_refused(gpt, work_folder, tmp_path):
    with pytest.raises(train.RunError, match=r"sequence_classification, .*causal_lm"):
        train.save_run(tmp_path / "mine", *gpt, data=fine_tuning(work_folder, "one").data)
