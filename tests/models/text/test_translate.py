"""From a file of pairs to a translated file: trained, averaged, scored, by the command line."""

import dataclasses
import io
import json
import random
import sys

import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data import TokenizerConfig, TranslationData
from flaxzoo.models.text.translate import TextTranslator, Translation, note_of_empty
from flaxzoo.train.cli import main as cli
from flaxzoo.train.config import to_dict
from flaxzoo.train.runs.config_json import from_dict

pytestmark = [pytest.mark.usefixtures("on_one_device"), pytest.mark.slow]  # one trained run

WORDS = dict(
    zip("one two three four five".split(), "un deux trois quatre cinq".split(), strict=True)
)


def write_pairs(folder, name, number, seed):
    draw = random.Random(seed)
    sources = [draw.choices(list(WORDS), k=draw.randint(1, 4)) for _ in range(number)]
    targets = [[WORDS[word] for word in words] for words in sources]
    for suffix, side in (("en", sources), ("fr", targets)):
        (folder / f"{name}.{suffix}").write_text("".join(f"{' '.join(x)}\n" for x in side))
    return f"pairs:{folder}/{name}.en,{folder}/{name}.fr"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that learned five words, and the folder it is in."""
    folder = tmp_path_factory.mktemp("translating")
    config = train.TrainConfig(
        model=models.EncoderDecoderConfig(
            vocab_size=1, max_length=48, num_layers=2, d_model=32, num_heads=2, d_ff=64,
            dropout_rate=0.0,
        ),
        data=TranslationData(
            source=write_pairs(folder, "train", 2000, 0),
            validation=write_pairs(folder, "valid", 30, 1),
            length=48,
            tokenizer=TokenizerConfig(kind="sentencepiece-unigram", vocab_size=290),
        ),
        optimizer=train.OptimizerConfig(
            peak_learning_rate=5e-3, schedule="linear", warmup_steps=20,
            beta2=0.98, weight_decay=0.0,
        ),
        objective=train.Seq2SeqConfig(label_smoothing=0.1),
        steps=300,
        batch_size=8,
        evaluate_every=150,
        checkpoint_every=150,
        sample_prompt="two four",
    )  # fmt: skip
    result = train.train(config, folder / "run", quiet=True)
    return folder, result


def output(capsys, *arguments):
    assert cli.main([str(a) for a in arguments]) == 0
    return capsys.readouterr()


@pytest.mark.slow
def test_losses_without_the_heads_of_either_side(run):
    """The loss of the whole model is the one that is scored, whatever is taken out beside it."""
    folder = run[0] / "run"
    losses = train.losses_without_heads(folder, log=lambda line: None)
    names = "head_mask decoder_head_mask cross_attn_head_mask".split()
    assert {name: x.shape for name, x in losses.items()} == {
        "loss": (), **dict.fromkeys(names, (2, 2))
    }  # fmt: skip
    assert float(losses["loss"]) == pytest.approx(
        train.score_run(folder, num_beams=1, log=lambda line: None)["loss"], rel=1e-5
    )
    # Without its look at the source, a translation is a guess.
    assert losses["cross_attn_head_mask"].max() > losses["loss"] + 0.1


@pytest.mark.slow
def test_the_trained_model_translates_and_reports_it(run):
    _, result = run
    assert result.sample == "two four\ndeux quatre"
    assert result.validation["nll"] < 0.3
    assert result.validation["perplexity"] == pytest.approx(np.exp(result.validation["nll"]))
    assert result.validation["loss"] < result.validation["nll"] + 0.5
    assert from_dict(to_dict(result.run.stated)) == result.run.stated


@pytest.mark.slow
def test_evaluate_prints_losses_and_bleu(run, capsys):
    folder, _ = run
    printed = output(capsys, "evaluate", folder / "run")
    scores = json.loads(printed.out)  # and nothing else: progress is on standard error
    assert "30 of 30 sentences: " in printed.err
    assert scores["exact_match"] > 0.9
    assert scores["bleu"] > 90
    assert scores["chrf"] > 90
    assert {"loss", "nll", "perplexity", "bleu_signature", "chrf_signature"} <= scores.keys()
    assert scores["num_beams"] == 4
    assert scores["sentences"] == 30
    greedy = output(capsys, "evaluate", folder / "run", "--num-beams", "1").out
    assert json.loads(greedy)["num_beams"] == 1


@pytest.mark.slow
def test_bleu_counts_every_pair_and_the_loss_those_with_two_sides(run, tmp_path, capsys):
    folder, _ = run
    (tmp_path / "q.tsv").write_text("one\tun\ntwo\t\nthree\ttrois\n\tquatre\nfive\tcinq\n")
    printed = output(capsys, "evaluate", folder / "run", "--data", f"tsv:{tmp_path}/q.tsv")
    assert "data: 3 pairs, " in printed.err
    assert f"(first: {tmp_path}/q.tsv line 2)" in (printed.err)
    assert "all 5 pairs" in printed.err
    scores = json.loads(printed.out)
    assert (scores["pairs"], scores["sentences"], scores["exact_match"]) == (3, 5, 0.6)


def test_a_translated_file_keeps_its_order_and_its_empty_lines(run, tmp_path, capsys):
    folder, _ = run
    lines = ["four", "", "one two three five", "  ", "two"]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    output(capsys, "translate", folder / "run", "--input", tmp_path / "in.txt",
           "--output", tmp_path / "out.txt")  # fmt: skip
    translated = (tmp_path / "out.txt").read_text().split("\n")
    assert translated == ["quatre", "", "un deux trois cinq", "", "deux", ""]


@pytest.mark.slow
def test_n_best_on_standard_output(run, capsys, monkeypatch):
    folder, _ = run
    monkeypatch.setattr(sys, "stdin", type("", (), {"buffer": io.BytesIO(b"five\n\none two\n")}))
    best = output(
        capsys, "translate", folder / "run", "--input", "-", "--num-return-sequences", "2"
    ).out
    rows = [line.split("\t") for line in best.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "3", "3"]
    assert rows[0][2] == "cinq"
    assert rows[3][2] == "un deux"
    assert float(rows[0][1]) >= float(rows[1][1])


@pytest.mark.slow
def test_a_text_does_not_depend_on_its_neighbours(run):
    folder, _ = run
    translator = TextTranslator.of_run(folder / "run")
    texts = ["one two three four", "five", "two two", "three"]
    together = translator(texts, num_beams=3, num_return_sequences=2)
    for text, expected in zip(texts, together, strict=True):
        [alone] = translator([text], num_beams=3, num_return_sequences=2)
        assert [t.text for t in alone] == [t.text for t in expected]
        np.testing.assert_allclose([t.score for t in alone], [t.score for t in expected], atol=1e-4)


def test_empty_translations_are_noted(run, tmp_path, capsys, monkeypatch):
    folder, _ = run
    (tmp_path / "in.txt").write_text("one\n\ntwo\n")
    monkeypatch.setattr(TextTranslator, "_translation", lambda *_: Translation("", -1.0, -1.0, 1))
    logged = output(capsys, "translate", folder / "run", "--input", tmp_path / "in.txt").err
    assert "2 of 2 translations" in logged
    assert "30 of 30 translations" in output(capsys, "evaluate", folder / "run").err
    few = [[Translation("" if i == 0 else "x", 0.0, 0.0, 1)] for i in range(10)]
    assert note_of_empty(["x"] * 10, few) is None


def test_a_translation_begins_with_no_space(run, monkeypatch):
    translator = TextTranslator.of_run(run[0] / "run")
    monkeypatch.setattr(type(translator._target), "decode", lambda self, tokens: " un  deux ")
    assert translator(["one"])[0][0].text == "un  deux"


def test_averaged_checkpoints_translate(run, capsys):
    folder, _ = run
    logged = output(capsys, "average", folder / "run", "--last", "2").err
    assert "checkpoints 150, 300" in logged
    scores = json.loads(output(capsys, "evaluate", folder / "run-averaged").out)
    assert scores["exact_match"] > 0.8


def fails(capsys, message, *arguments):
    assert cli.main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") <= 1


def test_invalid_input_is_refused(run, tmp_path, capsys):
    folder, _ = run
    (tmp_path / "long.txt").write_text("one " * 60)
    fails(capsys, f"{tmp_path}/long.txt line 1 has",
          "translate", folder / "run", "--input", tmp_path / "long.txt")  # fmt: skip
    (tmp_path / "in.txt").write_text("one\n")
    (tmp_path / "symbolic").symlink_to(tmp_path / "in.txt")
    (tmp_path / "hard").hardlink_to(tmp_path / "in.txt")
    for other in ("in.txt", "../in.txt", "symbolic", "hard"):
        work_folder = tmp_path / tmp_path.name / other if ".." in other else tmp_path / other
        (tmp_path / tmp_path.name).mkdir(exist_ok=True)
        fails(capsys, f"output {work_folder} is the input", "translate",
              folder / "run", "--input", tmp_path / "in.txt", "--output", work_folder)  # fmt: skip
    assert (tmp_path / "in.txt").read_text() == "one\n"
    (tmp_path / "in.npy").write_text("one\n")
    fails(capsys, "is the input", "embed", folder / "run", "--input", tmp_path / "in.npy",
          "--output", tmp_path / "in.npy")  # fmt: skip
    (tmp_path / "long.txt").write_text("one\n" + "one two " * 40 + "\n" + "one " * 90 + "\n")
    fails(capsys, "the 48 that the model reads (2 texts",
          "translate", folder / "run", "--input", tmp_path / "long.txt")  # fmt: skip
    logged = output(capsys, "translate", folder / "run", "--input", tmp_path / "long.txt",
                  "--truncate", "--output", tmp_path / "short.txt").err  # fmt: skip
    assert "\n2 of 3 texts truncated" in f"\n{logged}"
    assert logged.endswith(f"{tmp_path}/short.txt: 3 lines translated\n")
    assert len((tmp_path / "short.txt").read_text().splitlines()) == 3
    fails(capsys, "is a folder", "translate", folder / "run", "--input", folder / "valid.en",
          "--output", tmp_path)  # fmt: skip
    for command in (("translate", "--input", folder / "valid.en"), ("evaluate",)):
        fails(capsys, "--num-beams ",
              command[0], folder / "run", *command[1:], "--num-beams", "0")  # fmt: skip
    fails(capsys, "--num-return-sequences 5 ", "translate", folder / "run", "--input",
          folder / "valid.en", "--num-return-sequences", "5")  # fmt: skip
    fails(capsys, "no such file", "translate", folder / "run", "--input", tmp_path / "none")
    fails(capsys, "command translate\n", "generate", folder / "run")
    fails(capsys, "seq2seq_lm", "embed", folder / "run", "--input", tmp_path / "long.txt",
          "--output", tmp_path / "x.npy")  # fmt: skip
    fails(capsys, "command translate",
          "predict", folder / "run", "--input", tmp_path / "long.txt")  # fmt: skip
    model = dataclasses.replace(run[1].run.config.model, max_length=128)
    config = dataclasses.replace(train.recipe("quickstart"), model=model)
    with pytest.raises(train.RunError, match=r"transformer .*causal"):
        train.train(config, tmp_path / "causal", quiet=True)
    assert not (tmp_path / "causal").exists()
