"""What a run begins with: another's parameters, its own checkpoint, settings that must fit."""

import dataclasses
import re
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data import UserError
from flaxzoo.models.run_files import newest_step, steps
from flaxzoo.train.config import in_steps
from flaxzoo.train.optim.parameters import named
from flaxzoo.train.runs.init_from import init_from, plan_init_from

from ...support.encoders import OPTIMIZER, SIZES, fine_tuning, pretraining

pytestmark = pytest.mark.usefixtures("on_one_device")


def parameters(folder):
    _, params = models.load(folder)
    return {name: np.asarray(x) for name, x in named(params)}


def begun(folder, model):
    """Parameters of a model that begins with a run, its fresh ones, and what was said."""
    lines = []
    source = train.open_run(folder)[0].model
    fresh = models.init_params(models.create(model), jax.random.key(5))
    shardings = jax.tree.map(lambda x: x.sharding, fresh)
    plan = plan_init_from(folder, newest_step(folder), source, model)
    params = init_from(plan, fresh, shardings, lines.append)
    flat = [{name: np.asarray(x) for name, x in named(tree)} for tree in (params, fresh)]
    return *flat, lines


@pytest.mark.slow
def test_the_body_is_copied_and_the_head_is_new(pretrained):
    source = train.open_run(pretrained)[0].model
    model = dataclasses.replace(source, head="token_classification", labels=("O", "B-X", "I-X"))
    params, fresh, lines = begun(pretrained, model)
    theirs = parameters(pretrained)
    for name, x in params.items():
        expected = fresh if name.startswith("head/") else theirs
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
    copied, new, left = lines
    assert "copied embedding_norm, layers, position_embedding, token_embedding" in copied
    assert new == "new, with random values: head/classifier (51 parameters)"
    assert left.startswith("left behind: head/bias, head/next_sentence, head/transform")


@pytest.mark.slow
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
    with pytest.raises(train.RunError, match=r"token_embedding/embedding .*this run"):
        begun(pretrained, dataclasses.replace(source, vocab_size=source.vocab_size + 1))


@pytest.mark.slow
def test_a_second_phase_takes_the_head_too(work_folder, pretrained, capsys):
    config = pretraining(work_folder, init_from=str(pretrained), steps=1)
    result = train.train(config, work_folder / "second phase")
    assert result.finished
    messages = capsys.readouterr().err
    assert "head/next_sentence" in messages
    assert "new, with random" not in messages
    assert "left behind" not in messages


@pytest.mark.slow
def test_what_a_run_begins_with_decides_its_sizes(work_folder, pretrained):
    config = fine_tuning(work_folder, "one", init_from=str(pretrained))
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, d_model=64, dropout_rate=0.3)
    )
    run = train.train(
        dataclasses.replace(config, epochs=0.5), work_folder / "sizes", quiet=True
    ).run
    assert (run.config.model.d_model, run.config.model.dropout_rate) == (16, 0.3)
    assert run.config.model.labels == ("0", "1")
    assert run.tokenizer.fingerprint == train.open_run(pretrained)[1].fingerprint
    too_long = dataclasses.replace(
        config, data=dataclasses.replace(config.data, length=40), epochs=1.0
    )
    with pytest.raises(ValueError, match=r"data.length 40 .*model.max_length 32"):
        train.train(too_long, work_folder / "too long", quiet=True)
    assert not (work_folder / "too long").exists()


def test_what_a_run_cannot_begin_with_leaves_no_folder(work_folder, pretrained):
    unborn = work_folder / "unborn"
    shutil.copytree(pretrained, unborn, ignore=shutil.ignore_patterns("checkpoints"))
    config = fine_tuning(work_folder, "one", init_from=str(unborn))
    with pytest.raises(FileNotFoundError, match=r"unborn .*checkpoint"):
        train.train(config, work_folder / "from nothing", quiet=True)
    config = fine_tuning(work_folder, "one", init_from=str(pretrained), init_step=3)
    with pytest.raises(FileNotFoundError, match=r"step 3: .* 4"):
        train.train(config, work_folder / "from nothing", quiet=True)
    assert not (work_folder / "from nothing").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pretraining", "tag"])
def test_a_run_that_was_stopped_is_the_run_never_stopped(work_folder, pretrained, kind):
    config = (
        pretraining(work_folder, checkpoint_every=2)
        if kind == "pretraining"
        else fine_tuning(work_folder, kind, init_from=str(pretrained), checkpoint_every=2)
    )
    whole, again = work_folder / f"{kind} whole", work_folder / f"{kind} again"
    assert train.train(config, whole, quiet=True).finished
    # The same run, but for what its first checkpoint does not hold.
    shutil.copytree(whole, again)
    for step in steps(again)[1:]:
        shutil.rmtree(again / "checkpoints" / str(step))
    train.train(config, again, quiet=True)
    for name, x in parameters(again).items():
        np.testing.assert_array_equal(x, parameters(whole)[name], err_msg=name)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("no gap", ".MASK."), ("[MASK] " + "cat " * 40, "32 tokens")],
)
def test_a_sample_prompt_is_checked_before_training(work_folder, prompt, message):
    with pytest.raises(train.RunError, match=message):
        train.train(
            pretraining(work_folder, sample_prompt=prompt), work_folder / "prompt", quiet=True
        )
    config = fine_tuning(work_folder, "one", sample_prompt="the")
    with pytest.raises(train.RunError, match=r"sample_prompt .*sequence_classification"):
        train.train(config, work_folder / "prompt", quiet=True)
    assert not (work_folder / "prompt").exists()


def test_an_encoder_decoder_has_no_head_for_labels(work_folder):
    config = fine_tuning(work_folder, "one")
    config = dataclasses.replace(config, model=models.EncoderDecoderConfig(**SIZES))
    with pytest.raises(train.RunError, match=r"transformer .*head"):
        train.train(config, work_folder / "gpt", quiet=True)


def test_epochs_become_steps(work_folder):
    config = dataclasses.replace(
        fine_tuning(work_folder, "one", epochs=2.5),
        optimizer=dataclasses.replace(OPTIMIZER, warmup_fraction=0.1),
    )
    counted = in_steps(config, num_examples=100)
    assert (counted.steps, counted.evaluate_every, counted.checkpoint_every) == (32, 13, 13)
    assert counted.optimizer.warmup_steps == 3
    given = dataclasses.replace(config, steps=7, evaluate_every=2)
    assert in_steps(given, num_examples=100).steps == 7
    assert in_steps(given, num_examples=100).evaluate_every == 2


def test_other_sizes_are_cut_to_three_parameters_and_name_their_fields(tmp_path):
    ours = models.GPTConfig(vocab_size=32, max_length=8, num_layers=1, d_model=16, num_heads=2)
    theirs = dataclasses.replace(ours, d_model=32)
    with pytest.raises(train.RunError) as caught:
        plan_init_from(tmp_path, None, theirs, ours)
    message = str(caught.value)
    assert message.count("this run has") == 3
    assert "same sizes" in message
    assert re.search(r"model\.d_model .*32.* 16", message)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["nothing", "run", "exported"])
def test_a_classifier_has_the_pooling_of_its_options(work_folder, pretrained, tmp_path, start):
    options: dict[str, Any] = {
        "model.pooling": "mean",
        "data.source": f"tsv:{work_folder}/texts.tsv",
    }
    if start == "run":
        options["init_from"] = str(pretrained)
    elif start == "exported":
        models.save(tmp_path / "exported", *models.load(pretrained))
        train.open_run(pretrained)[1].save(tmp_path / "exported")
        options["init_from"] = str(tmp_path / "exported")
    else:
        options |= {f"model.{name}": SIZES[name] for name in ("num_layers", "d_model", "num_heads")}
        options["data.tokenizer.vocab_size"] = 64
    options |= {"data.length": 16, "batch_size": 8, "steps": 1}
    config = train.recipe("bert-classify", **options)
    for _ in range(2):  # the second call finds the same run
        train.train(config, tmp_path / "run", quiet=True)
    model, params = models.load(tmp_path / "run")
    assert (model.config.pooling, model.config.head) == ("mean", "sequence_classification")
    assert list(params["head"]) == ["classifier"]


def test_the_head_of_the_data_cannot_be_set():
    with pytest.raises(UserError, match=r"model\.head"):
        train.recipe("bert-classify", **{"model.head": "sequence_classification"})
    with pytest.raises(UserError, match=r"pooling 'mean'"):
        train.recipe("bert-tag", **{"model.pooling": "mean"})
