"""From text to a fine-tuned encoder: pretraining, fine-tuning of every head, and use."""

import dataclasses
import functools
import json
import random
import shutil

import jax
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.choices import ChoiceData
from flaxzoo.data.classification import ClassificationData
from flaxzoo.data.pretraining import PretrainingData
from flaxzoo.data.spans import SpanData
from flaxzoo.data.tagging import TaggingData
from flaxzoo.train import cli, parallel
from flaxzoo.train.config import from_dict, in_steps, to_dict
from flaxzoo.train.initialise import begin, plan_beginning
from flaxzoo.train.optimizer import path_name
from flaxzoo.train.recipes import RECIPES

WORDS = "the cat sat on a mat and then it saw some dog run away from her big red house".split()
VOCABULARY = data.TokenizerConfig(kind="wordpiece", vocab_size=64)
SIZES = {"vocab_size": 1, "max_length": 32, "num_layers": 2, "d_model": 16, "num_heads": 2}
OPTIMIZER = train.OptimizerConfig(peak_learning_rate=1e-2, beta2=0.999)


def sentence(draw, size):
    return " ".join(draw.choices(WORDS, k=size))


def write_documents(file):
    draw = random.Random(0)
    documents = ["\n".join(sentence(draw, 6) for _ in range(8)) for _ in range(20)]
    file.write_text("\n\n".join(documents) + "\n")


def write_labelled(folder):
    """A file of each form; a text with a cat is positive, a cat is an animal."""
    draw = random.Random(1)
    texts = [f"{sentence(draw, 4)} {('cat', 'dog')[i % 2]}" for i in range(23)]
    lines = [f"{int('cat' in t.split())}\t{t}" for t in texts]
    (folder / "texts.tsv").write_text("\n".join(lines) + "\n")
    (folder / "several.tsv").write_text(
        "\n".join(f"{'cat,dog' if i % 3 else 'dog'}\t{t}" for i, t in enumerate(texts)) + "\n"
    )
    (folder / "scores.tsv").write_text("\n".join(f"{len(t) / 10}\t{t}" for t in texts) + "\n")
    tagged = [
        "\n".join(f"{w} {'B-ANIMAL' if w in ('cat', 'dog') else 'O'}" for w in t.split())
        for t in texts
    ]
    (folder / "words.conll").write_text("\n\n".join(tagged) + "\n")
    questions = [
        {
            "context": t,
            "qas": [
                {
                    "id": str(i),
                    "question": "what saw it",
                    "answers": [{"text": t.split()[-1], "answer_start": len(t) - 3}],
                }
            ],
        }
        for i, t in enumerate(texts)
    ]
    articles = [{"title": str(i), "paragraphs": [q]} for i, q in enumerate(questions)]
    (folder / "passages.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    choices = [
        {"context": t, "choices": ["the cat", "a dog", "red"], "label": i % 3}
        for i, t in enumerate(texts)
    ]
    (folder / "choices.jsonl").write_text("".join(json.dumps(c) + "\n" for c in choices))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_documents(folder / "documents.txt")
    write_labelled(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """Compiles for one of the eight devices, which is quicker."""
    with pytest.MonkeyPatch.context() as patch:
        make_mesh = functools.partial(parallel.make_mesh, devices=jax.devices()[:1])
        patch.setattr(parallel, "make_mesh", make_mesh)
        yield


def pretraining(place, **fields):
    settings = {"next_sentence": fields.pop("next_sentence", True)}
    return train.TrainConfig(
        model=models.BertConfig(**SIZES),
        data=PretrainingData(
            source=f"text:{place}/documents.txt#sentences",
            validation_fraction=0.2,
            length=32,
            tokenizer=VOCABULARY,
            **settings,
        ),
        optimizer=OPTIMIZER,
        batch_size=8,
        **{"steps": 4, **fields},
    )


@pytest.fixture(scope="module")
def pretrained(place):
    train.train(pretraining(place), place / "pretrained", quiet=True)
    return place / "pretrained"


KINDS = {
    "one": (ClassificationData, "tsv:texts.tsv", {}),
    "several": (ClassificationData, "tsv:several.tsv", {"target": "several"}),
    "score": (ClassificationData, "tsv:scores.tsv", {"target": "score"}),
    "tag": (TaggingData, "conll:words.conll", {}),
    "span": (SpanData, "squad:passages.json", {"stride": 4, "max_question_length": 8}),
    "choice": (ChoiceData, "jsonl:choices.jsonl", {}),
}
SCORES = {
    "one": {"accuracy", "f1", "matthews"},
    "several": {"accuracy", "f1_micro", "f1_macro"},
    "score": {"pearson", "spearman"},
    "tag": {"precision", "recall", "f1", "token_accuracy", "f1_ANIMAL"},
    "span": {"exact_match", "f1"},
    "choice": {"accuracy", "questions"},
}


def fine_tuning(place, kind, **fields):
    cls, source, settings = KINDS[kind]
    form, name = source.split(":")
    source = f"{form}:{place}/{name}"
    return train.TrainConfig(
        model=models.BertConfig(**SIZES),
        data=cls(source=source, validation=source, length=32, tokenizer=VOCABULARY, **settings),
        optimizer=OPTIMIZER,
        batch_size=8,
        **{"epochs": 2.0, **fields},
    )


@pytest.fixture(scope="module")
def tuned(place, pretrained):
    """The run folder of a model fine-tuned for a kind of data."""

    @functools.cache
    def tuned(kind):
        config = fine_tuning(place, kind, init_from=str(pretrained))
        result = train.train(config, place / kind, quiet=True)
        assert result.finished
        return result

    return tuned


@pytest.mark.parametrize("next_sentence", [True, False])
def test_pretraining_reports_both_objectives(place, pretrained, next_sentence):
    folder = pretrained
    if not next_sentence:
        folder = place / "masked only"
        train.train(pretraining(place, next_sentence=False), folder, quiet=True)
    scores = train.score_run(folder, say=lambda line: None)
    expected = {"loss", "masked_token", "masked_accuracy", "perplexity", "masked_tokens"}
    if next_sentence:
        expected |= {"next_sentence", "next_sentence_accuracy", "pairs"}
        assert scores["loss"] == pytest.approx(scores["masked_token"] + scores["next_sentence"])
    assert set(scores) == expected
    model, params = models.load(folder)
    assert model.config.head == ("pretraining" if next_sentence else "masked_lm")
    assert ("pooler" in params) == next_sentence


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_is_fine_tuned_and_scored(tuned, kind):
    result = tuned(kind)
    steps_per_epoch = -(-result.run.train.rows.rows_per_epoch // 8)
    assert result.step == 2 * steps_per_epoch
    assert set(result.validation) == {"loss"} | SCORES[kind]
    again = train.score_run(result.run.folder, say=lambda line: None)
    assert again == pytest.approx(result.validation, rel=1e-4)
    same = train.score_run(result.run.folder, result.run.stated.data.source, say=lambda line: None)
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


def parameters(folder):
    _, params = models.load(folder)
    return {path_name(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}


def begun(folder, model):
    """Parameters of a model that begins with a run, its fresh ones, and what was said."""
    lines = []
    source = train.open_run(folder)[0].model
    fresh = models.init_params(models.create(model), jax.random.key(5))
    shardings = jax.tree.map(lambda x: x.sharding, fresh)
    plan = plan_beginning(str(folder), models.loading.newest_step(folder), source, model)
    params = begin(plan, fresh, shardings, lines.append)
    flat = [
        {path_name(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (params, fresh)
    ]
    return *flat, lines


def test_the_body_is_copied_and_the_head_is_new(pretrained):
    source = train.open_run(pretrained)[0].model
    model = dataclasses.replace(source, head="token", labels=("O", "B-X", "I-X"))
    params, fresh, lines = begun(pretrained, model)
    theirs = parameters(pretrained)
    for name, x in params.items():
        expected = fresh if name.startswith("head/") else theirs
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
    copied, new, left = lines
    assert "copied embedding_norm, layers, position_embedding, token_embedding" in copied
    assert new == "new, with random values: head/classifier (51 parameters)"
    assert left.startswith("left behind: head/bias, head/next_sentence, head/transform")


def test_the_head_of_other_labels_is_new(tuned):
    folder = tuned("one").run.folder
    source = train.open_run(folder)[0].model
    params, fresh, _ = begun(folder, dataclasses.replace(source, labels=("no", "yes")))
    for name in ("head/classifier/kernel", "head/classifier/bias"):
        np.testing.assert_array_equal(params[name], fresh[name])
    params, _, lines = begun(folder, source)
    np.testing.assert_array_equal(
        params["head/classifier/kernel"], parameters(folder)["head/classifier/kernel"]
    )
    assert len(lines) == 1


def test_a_body_of_another_shape_is_refused(pretrained):
    source = train.open_run(pretrained)[0].model
    with pytest.raises(train.RunError, match=r"token_embedding/embedding .* where this run has"):
        begun(pretrained, dataclasses.replace(source, vocab_size=source.vocab_size + 1))


def test_a_second_phase_takes_the_head_too(place, pretrained, capsys):
    config = pretraining(place, init_from=str(pretrained), steps=1)
    result = train.train(config, place / "second phase")
    assert result.finished
    messages = capsys.readouterr().err
    assert "head/next_sentence" in messages
    assert "new, with random" not in messages
    assert "left behind" not in messages


def test_what_a_run_begins_with_decides_its_sizes(place, pretrained):
    config = fine_tuning(place, "one", init_from=str(pretrained))
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, d_model=64, dropout_rate=0.3)
    )
    run = train.train(dataclasses.replace(config, epochs=0.5), place / "sizes", quiet=True).run
    assert (run.config.model.d_model, run.config.model.dropout_rate) == (16, 0.3)
    assert run.config.model.labels == ("0", "1")
    assert run.tokenizer.fingerprint == train.open_run(pretrained)[1].fingerprint
    too_long = dataclasses.replace(
        config, data=dataclasses.replace(config.data, length=40), epochs=1.0
    )
    with pytest.raises(ValueError, match=r"data.length 40 exceeds model.max_length 32"):
        train.train(too_long, place / "too long", quiet=True)
    assert not (place / "too long").exists()


@pytest.mark.parametrize("kind", ["pretraining", "tag"])
def test_a_run_that_was_stopped_is_the_run_never_stopped(place, pretrained, kind):
    config = (
        pretraining(place, checkpoint_every=2)
        if kind == "pretraining"
        else fine_tuning(place, kind, init_from=str(pretrained), checkpoint_every=2)
    )
    whole, again = place / f"{kind} whole", place / f"{kind} again"
    assert train.train(config, whole, quiet=True).finished
    # The same run, but for what its first checkpoint does not hold.
    train.train(config, again, quiet=True)
    for step in models.loading.steps(again)[1:]:
        shutil.rmtree(again / "checkpoints" / str(step))
    train.train(config, again, quiet=True)
    for name, x in parameters(again).items():
        np.testing.assert_array_equal(x, parameters(whole)[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "measure"), [("one", "accuracy"), ("tag", "f1"), ("span", "exact_match")]
)
def test_a_head_learns(place, pretrained, kind, measure):
    """What a word decides is learned to perfection."""
    config = fine_tuning(place, kind, init_from=str(pretrained), epochs=40.0)
    config = dataclasses.replace(
        config,
        evaluate_every=1000,
        checkpoint_every=1000,
        model=dataclasses.replace(config.model, dropout_rate=0.0),
    )
    result = train.train(config, place / f"{kind} learned", quiet=True)
    assert result.validation[measure] > 0.9


def test_what_a_run_cannot_begin_with_leaves_no_folder(place, pretrained):
    unborn = place / "unborn"
    shutil.copytree(pretrained, unborn, ignore=shutil.ignore_patterns("checkpoints"))
    config = fine_tuning(place, "one", init_from=str(unborn))
    with pytest.raises(FileNotFoundError, match="unborn has no checkpoint yet"):
        train.train(config, place / "from nothing", quiet=True)
    config = fine_tuning(place, "one", init_from=str(pretrained), init_step=3)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3: it has 4"):
        train.train(config, place / "from nothing", quiet=True)
    assert not (place / "from nothing").exists()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("no gap", "must have a .MASK."), ("[MASK] " + "cat " * 40, "at most 32 tokens")],
)
def test_a_prompt_that_would_fail_after_training(place, prompt, message):
    with pytest.raises(train.RunError, match=message):
        train.train(pretraining(place, sample_prompt=prompt), place / "prompt", quiet=True)
    config = fine_tuning(place, "one", sample_prompt="the")
    with pytest.raises(train.RunError, match="head sequence writes no sample"):
        train.train(config, place / "prompt", quiet=True)
    assert not (place / "prompt").exists()


def test_a_pretraining_run_shows_what_fills_its_gap(place):
    config = pretraining(place, sample_prompt="the [MASK] sat", steps=1)
    sample = train.train(config, place / "sample", quiet=True).sample
    assert sample.startswith("the [MASK] sat\n")
    assert sample in (place / "sample" / "report.md").read_text()


def test_a_gpt_has_no_head_for_labels(place):
    config = fine_tuning(place, "one")
    config = dataclasses.replace(config, model=models.GPTConfig(**SIZES))
    with pytest.raises(
        train.RunError, match=r"gpt has no head for classify data \(it has causal_lm\): choose"
    ):
        train.train(config, place / "gpt", quiet=True)


def test_a_label_that_training_has_not(tuned, place, tmp_path):
    (tmp_path / "new.tsv").write_text("1\tthe cat\n7\tthe dog\n")
    with pytest.raises(data.DataError, match=r"new.tsv line 2 has the label '7'"):
        train.score_run(tuned("one").run.folder, f"tsv:{tmp_path}/new.tsv", say=print)


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
    assert "line 1 has 1 texts: write two, parted by a tab" in capsys.readouterr().err


def test_predict_wants_a_head(place, tmp_path, capsys):
    train.train(pretraining(place, next_sentence=False, steps=1), place / "no pairs", quiet=True)
    (tmp_path / "input").write_text("the cat\n")
    assert cli.main(["predict", str(place / "no pairs"), "--input", str(tmp_path / "input")]) == 2
    assert "pretraining data has no labels to predict" in capsys.readouterr().err


def test_fill_mask(pretrained, capsys):
    filler = train.MaskFiller.of_run(pretrained)
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
    assert "has no [MASK]: write it where a word is missing" in capsys.readouterr().err


def test_generate_wants_a_causal_language_model(pretrained, capsys):
    assert cli.main(["generate", str(pretrained), "--prompt", "the"]) == 2
    out, err = capsys.readouterr()
    assert (out, "head pretraining continues no text: give a run" in err) == ("", True)


def test_fill_mask_wants_a_masked_language_model(tuned, capsys):
    assert cli.main(["fill-mask", str(tuned("one").run.folder), "a [MASK]"]) == 2
    assert "a model with the head sequence fills no masks" in capsys.readouterr().err


def test_embed_is_the_mean_of_each_text_alone(pretrained, tmp_path, capsys):
    texts = ["the cat sat on a mat and then it saw some dog", "dog", "", "a big red house " * 20]
    (tmp_path / "texts").write_text("\n".join(texts) + "\n")
    output = tmp_path / "vectors.npy"
    arguments = ["--input", str(tmp_path / "texts"), "--output", str(output)]
    assert cli.main(["embed", str(pretrained), *arguments]) == 0
    assert "1 of 4 texts are cut to 32 tokens" in capsys.readouterr().err
    vectors = np.load(output)
    assert vectors.shape == (4, 16)
    model, params = models.load(pretrained)
    _, tokenizer = train.open_run(pretrained)
    for text, vector in zip(texts[:3], vectors[:3], strict=True):
        ids = np.array([tokenizer.encode(text)])
        hidden = model.apply({"params": params}, input_ids=ids).last_hidden_state
        np.testing.assert_allclose(vector, hidden[0].mean(axis=0), rtol=0, atol=1e-5)
    assert cli.main(["embed", str(pretrained), *arguments[:2], "--output", "vectors.txt"]) == 2
    assert "must end in .npy" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_is_kept_as_json(name):
    config = train.recipe(name)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_epochs_become_steps(place):
    config = dataclasses.replace(
        fine_tuning(place, "one", epochs=2.5),
        optimizer=dataclasses.replace(OPTIMIZER, warmup_fraction=0.1),
    )
    counted = in_steps(config, rows_per_epoch=100)
    assert (counted.steps, counted.evaluate_every, counted.checkpoint_every) == (32, 13, 13)
    assert counted.optimizer.warmup_steps == 3
    given = dataclasses.replace(config, steps=7, evaluate_every=2)
    assert in_steps(given, rows_per_epoch=100).steps == 7
    assert in_steps(given, rows_per_epoch=100).evaluate_every == 2
