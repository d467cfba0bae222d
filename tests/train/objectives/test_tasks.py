"""From text to a fine-tuned encoder: pretraining, fine-tuning of every head, and use."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from flaxzoo import data, models, train
from flaxzoo.train.cli import main as cli

from ...support.encoders import KINDS, fine_tuning, pretraining

pytestmark = pytest.mark.usefixtures("on_one_device")


SCORES = {
    "one": {"accuracy", "f1", "matthews"},
    "several": {"accuracy", "f1_micro", "f1_macro"},
    "score": {"pearson", "spearman"},
    "tag": {"precision", "recall", "f1", "token_accuracy", "f1_ANIMAL"},
    "span": {"exact_match", "f1"},
    "choice": {"accuracy", "questions"},
}


@pytest.mark.parametrize(
    ("recipe", "fields", "beginning"),
    [
        ("multi30k-en-de", {}, "loss is smoothed (--objective.label-smoothing 0.1)"),
        ("multi30k-en-de", {"objective": train.Seq2SeqConfig()}, None),
        ("bert-quickstart", {}, "loss is the sum of masked_token"),
    ],
)
def test_a_loss_that_differs_from_the_metrics_is_explained(recipe, fields, beginning):
    config = dataclasses.replace(train.recipe(recipe), **fields)
    note = config.objective.loss_note(config.data)
    assert note is None if beginning is None else note.startswith(beginning)


@pytest.mark.parametrize("next_sentence", [True, False])
def test_pretraining_reports_both_objectives(pretrained, masked, next_sentence):
    folder = pretrained if next_sentence else masked
    scores = train.score_run(folder, log=lambda line: None)
    expected = {"loss", "masked_token", "masked_accuracy", "perplexity", "masked_tokens"}
    if next_sentence:
        expected |= {"next_sentence", "next_sentence_accuracy", "pairs"}
        assert scores["loss"] == pytest.approx(scores["masked_token"] + scores["next_sentence"])
    assert set(scores) == expected
    model, params = models.load(folder)
    assert model.config.head == ("pretraining" if next_sentence else "masked_lm")
    assert ("pooler" in params) == next_sentence


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_head_is_fine_tuned_and_scored(tuned, kind):
    result = tuned(kind)
    steps_per_epoch = -(-result.run.train.examples.num_examples // 8)
    assert result.step == 2 * steps_per_epoch
    assert set(result.validation) == {"loss"} | SCORES[kind]
    again = train.score_run(result.run.folder, log=lambda line: None)
    assert again == pytest.approx(result.validation, rel=1e-4)
    same = train.score_run(result.run.folder, result.run.stated.data.source, log=lambda line: None)
    assert same == pytest.approx(again, rel=1e-4)


INPUTS = {
    "one": "the cat sat\na dog run away\n",
    "several": "the cat sat\na dog run away\n",
    "score": "the cat sat\na dog run away\n",
    "tag": "the cat sat\na dog run away\n",
    "span": '{"context": "the cat sat", "question": "what"}\n'
    '{"context": "a dog run away", "question": "what"}\n',
    "choice": '{"context": "the cat", "choices": ["sat", "run", "away"]}\n'
    '{"context": "a dog", "choices": ["sat", "run", "away"]}\n',
}


@pytest.mark.parametrize("kind", KINDS)
def test_predict_answers_for_every_head(tuned, kind, tmp_path, capsys):
    folder = tuned(kind).run.folder
    (tmp_path / "input").write_text(INPUTS[kind])
    assert cli.main(["predict", str(folder), "--input", str(tmp_path / "input")]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    if kind in ("one", "choice"):
        answer = "label" if kind == "one" else "choice"
        probabilities = first["probabilities"]
        if isinstance(probabilities, dict):
            assert first[answer] == max(probabilities, key=lambda name: probabilities[name])
            probabilities = list(probabilities.values())
        assert sum(probabilities) == pytest.approx(1)
    elif kind == "several":
        assert set(first["labels"]) == {n for n, p in first["probabilities"].items() if p > 0.5}
    elif kind == "score":
        assert isinstance(first["score"], float)
    elif kind == "tag":
        assert second["words"] == "a dog run away".split()
        assert len(second["tags"]) == len(second["probabilities"]) == 4
    else:
        assert first["answer"] in "the cat sat"
        assert "the cat sat"[first["start"] : first["end"]] == first["answer"]
        assert first["n_best"][0]["answer"] == first["answer"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "measure"), [("one", "accuracy"), ("tag", "f1"), ("span", "exact_match")]
)
def test_a_head_learns(work_folder, pretrained, kind, measure):
    """What a word decides is learned to perfection."""
    config = fine_tuning(work_folder, kind, init_from=str(pretrained), epochs=40.0)
    config = dataclasses.replace(
        config,
        evaluate_every=1000,
        checkpoint_every=1000,
        model=dataclasses.replace(config.model, dropout_rate=0.0),
    )
    result = train.train(config, work_folder / f"{kind} learned", quiet=True)
    assert result.validation[measure] > 0.9


@pytest.mark.slow
def test_a_pretraining_run_shows_what_fills_its_gap(work_folder):
    config = pretraining(work_folder, sample_prompt="the [MASK] sat", steps=1)
    sample = train.train(config, work_folder / "sample", quiet=True).sample
    assert sample.startswith("the [MASK] sat\n")
    assert sample in (work_folder / "sample" / "report.md").read_text()


def test_a_label_that_training_has_not(tuned, work_folder, tmp_path):
    (tmp_path / "new.tsv").write_text("1\tthe cat\n7\tthe dog\n")
    with pytest.raises(data.DataError, match=r"new.tsv line 2.*label '7'"):
        train.score_run(tuned("one").run.folder, f"tsv:{tmp_path}/new.tsv", log=print)


@pytest.mark.slow
def test_predict_says_what_continues_a_text(pretrained, tmp_path, capsys):
    (tmp_path / "input").write_text("the cat\tsat on a mat\na dog\trun away\n")
    assert cli.main(["predict", str(pretrained), "--input", str(tmp_path / "input")]) == 0
    first, _ = map(json.loads, capsys.readouterr().out.splitlines())
    model, params = models.load(pretrained)
    special = (tokenizer := train.open_run(pretrained)[1]).special_ids
    one, other = tokenizer.encode_batch(["the cat", "sat on a mat"])
    ids = np.array([[special.cls, *one, special.sep, *other, special.sep]])
    types = np.array([[0] * (len(one) + 2) + [1] * (len(other) + 1)])
    logits = model.apply({"params": params}, input_ids=ids, token_type_ids=types)
    expected = float(jax.nn.softmax(logits.seq_relationship_logits[0])[0])
    assert first["probability"] == pytest.approx(expected, rel=1e-4)
    assert first["is_next"] == (expected > 0.5)
    (tmp_path / "input").write_text("the cat\n")
    assert cli.main(["predict", str(pretrained), "--input", str(tmp_path / "input")]) == 2
    assert "line 1 has 1 texts" in capsys.readouterr().err


def test_predict_wants_a_head(masked, tmp_path, capsys):
    (tmp_path / "input").write_text("the cat\n")
    assert cli.main(["predict", str(masked), "--input", str(tmp_path / "input")]) == 2
    assert "no labels" in capsys.readouterr().err


@pytest.mark.slow
def test_fill_mask(pretrained, capsys):
    filler = models.MaskFiller.of_run(pretrained)
    gaps = filler("the [MASK] sat on [MASK]", top_k=3)
    assert len(gaps) == 2
    for gap in gaps:
        probabilities = [candidate.probability for candidate in gap]
        assert probabilities == sorted(probabilities, reverse=True)
        assert 0 < sum(probabilities) < 1
    # What a plain forward pass says of the same tokens.
    model, params = models.load(pretrained)
    _, tokenizer = train.open_run(pretrained)
    special = tokenizer.special_ids
    before, after = (tokenizer.encode(t, add_special_tokens=False) for t in ("the", "sat on"))
    ids = [special.cls, *before, special.mask, *after, special.mask, special.sep]
    logits = model.apply({"params": params}, input_ids=np.array([ids])).prediction_logits
    expected = jax.nn.softmax(logits[0, 1 + len(before)])
    assert gaps[0][0].id == int(expected.argmax())
    assert gaps[0][0].probability == pytest.approx(float(expected.max()), rel=1e-4)
    assert cli.main(["fill-mask", str(pretrained), "the [MASK] sat", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["masks"][0]) == 5
    assert cli.main(["fill-mask", str(pretrained), "the cat sat"]) == 2
    assert "no [MASK]" in capsys.readouterr().err


def test_generate_wants_a_causal_language_model(pretrained, capsys):
    assert cli.main(["generate", str(pretrained), "--prompt", "the"]) == 2
    out, err = capsys.readouterr()
    assert (out, "head pretraining " in err) == ("", True)


def test_fill_mask_wants_a_masked_language_model(tuned, capsys):
    assert cli.main(["fill-mask", str(tuned("one").run.folder), "a [MASK]"]) == 2
    assert "head sequence_classification " in capsys.readouterr().err


@pytest.mark.slow
def test_embed_is_the_mean_of_each_text_alone(pretrained, tmp_path, capsys):
    texts = ["the cat sat on a mat and then it saw some dog", "dog", "", "a big red house " * 20]
    (tmp_path / "texts").write_text("\n".join(texts) + "\n")
    output = tmp_path / "vectors.npy"
    arguments = ["--input", str(tmp_path / "texts"), "--output", str(output)]
    assert cli.main(["embed", str(pretrained), *arguments]) == 0
    assert "1 of 4 texts truncated" in capsys.readouterr().err
    vectors = np.load(output)
    assert vectors.shape == (4, 16)
    model, params = models.load(pretrained)
    _, tokenizer = train.open_run(pretrained)
    for text, vector in zip(texts[:3], vectors[:3], strict=True):
        ids = np.array([tokenizer.encode(text)])
        hidden = model.apply({"params": params}, input_ids=ids).last_hidden_state
        np.testing.assert_allclose(vector, hidden[0].mean(axis=0), rtol=0, atol=1e-5)
    assert cli.main(["embed", str(pretrained), *arguments[:2], "--output", "vectors.txt"]) == 2
    assert "--output must be" in capsys.readouterr().err


@pytest.mark.slow
def test_a_gpt_learns_to_classify():
    """The label of a sequence is whether its first token is even."""
    config = models.GPTConfig(
        vocab_size=16, max_length=8, num_layers=1, d_model=16, num_heads=2, dropout_rate=0.0,
        head="sequence_classification", labels=("odd", "even"),
    )  # fmt: skip
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    assert params["head"]["classifier"].keys() == {"kernel"}
    tx = optax.adam(3e-3)
    step = jax.jit(train.make_train_step(model.apply, train.CLASSIFICATION, tx))
    state, rng = train.init_state(params, tx), np.random.default_rng(0)
    metrics = {}
    for _ in range(200):
        ids = rng.integers(1, 16, (32, 8), dtype=np.int32)
        mask = (np.arange(8) < rng.integers(2, 9, (32, 1))).astype(np.int32)
        batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": 1 - ids[:, 0] % 2}
        state, metrics = step(state, batch, jax.random.key(0))
    assert float(metrics["loss"]) < 0.1
    assert float(metrics["accuracy"]) > 0.95
