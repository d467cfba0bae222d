"""What is refused before a run begins, and what a run folder holds."""

import dataclasses
import functools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.tokenizers.training import TokenizerConfig
from flaxzoo.train.config import differences, to_dict
from flaxzoo.train.engine import compile as parallel
from flaxzoo.train.runs.config_json import from_dict
from flaxzoo.train.runs.run_folder import create_folder, open_run, prepare_run

WORDS = "the cat sat on a mat and then it saw some dog run away from her big red house".split()


def write_text(file, seed=0):
    draw = random.Random(seed)
    file.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=20)) for _ in range(60)))


def make_config(folder):
    write_text(folder / "text.txt")
    return train.TrainConfig(
        model=models.GPTConfig(vocab_size=1, max_length=16, num_layers=2, d_model=16, num_heads=2),
        data=data.CausalLMData(
            source=f"text:{folder}/text.txt#block",
            validation_fraction=0.1,
            length=16,
            tokenizer=TokenizerConfig(kind="characters"),
        ),
        optimizer=train.OptimizerConfig(peak_learning_rate=1e-2),
        steps=4,
        batch_size=8,
        log_every=1,
        evaluate_every=2,
        checkpoint_every=2,
    )


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path)


def use_one_device(patch):
    """Compiles for one of the eight devices, which is quicker."""
    make_mesh = functools.partial(parallel.make_mesh, devices=jax.devices()[:1])
    patch.setattr(parallel, "make_mesh", make_mesh)


@pytest.fixture
def one_device(monkeypatch):
    use_one_device(monkeypatch)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The configuration and the folder of a run that ended."""
    folder = tmp_path_factory.mktemp("ended")
    config = make_config(folder)
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        train.train(config, folder / "run", quiet=True)
    return config, folder / "run"


def replaced(config, **fields):
    """`config` with fields named as on the command line, _ for the dot: model__d_model."""
    for name, value in fields.items():
        outer, _, inner = name.partition("__")
        if inner:
            value = dataclasses.replace(getattr(config, outer), **{inner: value})
        config = dataclasses.replace(config, **{outer: value})
    return config


def log(line):
    assert "\n" not in line


@pytest.mark.slow
def test_a_run_folder_describes_itself(ended):
    config, run = ended
    assert {path.name for path in run.iterdir()} == {
        "config.json",
        "tokenizer",
        "checkpoints",
        "metrics.jsonl",
        "tensorboard",
        "report.md",
        "loss.png",
    }
    stored, tokenizer = open_run(run)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    # The vocabulary grows to the tokenizer's; all else is as it was given.
    assert stored == replaced(config, model__vocab_size=tokenizer.vocab_size)
    assert {path.name for path in (run / "checkpoints" / "4").iterdir()} >= {
        "params",
        "optimizer",
        "data",
    }
    assert list((run / "tensorboard").iterdir())
    assert not any(path.name.startswith(".") for path in run.rglob("*"))
    assert json.loads((run / "config.json").read_text())["model"]["architecture"] == "gpt"
    assert data.load_tokenizer(run / "tokenizer").fingerprint == tokenizer.fingerprint


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_load_gives_the_model_that_was_trained(ended, monkeypatch, tmp_path):
    config, run = ended
    from flaxzoo.train.engine import start

    states = []
    make = start.compile_trainer

    def remember(*arguments):
        program = make(*arguments)

        def step(state, batch):
            state, metrics = program.step(state, batch)
            states.append(jax.tree.map(jnp.copy, state.params))
            return state, metrics

        return dataclasses.replace(program, step=step)

    monkeypatch.setattr(start, "compile_trainer", remember)
    train.train(config, tmp_path / "again", quiet=True)
    model, params = models.load(tmp_path / "again")
    ids = np.arange(8)[None]
    apply = jax.jit(model.apply)
    logits = apply({"params": params}, input_ids=ids).logits
    expected = apply({"params": states[-1]}, input_ids=ids).logits
    assert np.array_equal(logits, expected)
    _, before = models.load(str(tmp_path / "again"), step=2)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, states[1]))
    # And a second run of the same configuration is the same run.
    assert jax.tree.all(jax.tree.map(np.array_equal, params, models.load(run)[1]))


def test_load_names_what_is_missing(config, ended, tmp_path):
    _, run = ended
    with pytest.raises(FileNotFoundError, match=r"step 3: .* 2, 4"):
        models.load(run, step=3)
    with pytest.raises(FileNotFoundError, match=r"nothing .*exist"):
        models.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        models.load(tmp_path)
    create_folder(prepare_run(config, tmp_path / "begun", log))
    with pytest.raises(FileNotFoundError, match=r"begun .*checkpoint"):
        models.load(tmp_path / "begun")


def test_parameters_are_read_in_the_precision_asked_for(ended):
    half = models.Execution(param_dtype="bfloat16")
    for execution, dtype in ((None, "float32"), (half, "bfloat16")):
        _, params = models.load(ended[1], execution=execution)
        assert {str(x.dtype) for x in jax.tree.leaves(params)} == {dtype}


def test_preparing_writes_no_folder(config, tmp_path):
    run = prepare_run(config, tmp_path / "run", log)
    assert not run.folder.exists()
    create_folder(run)
    written = (run.folder / "config.json").read_bytes()
    create_folder(prepare_run(config, tmp_path / "run", log))
    assert (run.folder / "config.json").read_bytes() == written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 5}, r"\(steps 4 → 5\)"),
        ({"seed": 1, "model__d_model": 32}, r"\(model\.d_model 16 → 32, seed 0 → 1\)"),
        ({"optimizer__beta1": 0.8}, r"optimizer\.beta1 0\.9 → 0\.8"),
        ({"data__packing": "first-fit"}, r"data\.packing 'concat' → 'first-fit'"),
    ],
)
def test_another_configuration_is_refused(config, tmp_path, changes, message):
    create_folder(prepare_run(config, tmp_path / "run", log))
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(train.RunError, match=message):
        train.train(replaced(config, **changes), tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_how_a_run_is_carried_out_may_change(config):
    other = replaced(
        config,
        mesh=train.MeshConfig(fsdp=2),
        parallel="pmap",
        execution__layers="unroll",
        execution__remat="full",
        data__num_workers=2,
        log_every=3,
        evaluate_every=1,
        checkpoint_every=1,
        keep_last=5,
        keep_best=2,
        skip_bad_steps=9,
        wandb_project="zoo",
        sample_prompt="the",
    )
    assert differences(config, other) == {}
    assert differences(config, replaced(config, execution__dtype="bfloat16")) == {
        "execution.dtype": ("float32", "bfloat16")
    }
    assert from_dict(json.loads(json.dumps(to_dict(other)))) == other


def test_another_mesh_is_not_recorded(config, tmp_path):
    create_folder(prepare_run(config, tmp_path / "run", log))
    other = replaced(config, mesh=train.MeshConfig(fsdp=2))
    run = prepare_run(other, tmp_path / "run", log)
    create_folder(run)
    assert run.config.mesh == other.mesh
    assert open_run(tmp_path / "run")[0].mesh == config.mesh


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("trained", [False, True])
def test_another_text_is_refused(config, tmp_path, trained):
    if trained:
        train.train(config, tmp_path / "run", quiet=True)
    else:
        create_folder(prepare_run(config, tmp_path / "run", log))
    write_text(tmp_path / "text.txt", seed=1)
    with pytest.raises(train.RunError, match=r"text\.txt#block .*changed"):
        train.train(config, tmp_path / "run", quiet=True)
    write_text(tmp_path / "text.txt")
    assert train.train(config, tmp_path / "run", quiet=True).finished


def test_a_folder_that_is_not_a_run_is_left_alone(config, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for workdir in (tmp_path / "mine", tmp_path / "text.txt"):
        with pytest.raises(train.RunError, match=r"exists .*run folder"):
            train.train(config, workdir, quiet=True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    (tmp_path / "empty").mkdir()
    prepare_run(config, tmp_path / "empty", log)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 6}, "batch_size 6 .*8 devices"),
        ({"mesh": train.MeshConfig(data=3)}, "multiply .*8 devices"),
        ({"mesh": train.MeshConfig(tensor=8)}, "mesh.tensor 8"),
        ({"parallel": "pmap", "batch_size": 6}, "batch_size 6 .*divided"),
        ({"data__source": "text:nowhere.txt"}, "no such file"),
        ({"data__validation_fraction": 0.0}, "no validation split"),
        ({"data__tokenizer": TokenizerConfig(vocab_size=5000)}, "too small .*vocabulary"),
        ({"model__max_length": 99_999, "data__length": 99_999}, "one sequence .*99999"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing_behind(config, tmp_path, changes, message):
    # Not even an empty folder: the corrected command would find another run in it.
    with pytest.raises(ValueError, match=message):
        train.train(replaced(config, **changes), tmp_path / "a" / "run", quiet=True)
    assert not (tmp_path / "a").exists()


def test_separate_layers_are_not_for_training(config):
    with pytest.raises(ValueError, match=r"execution\.layers separate "):
        replaced(config, execution__layers="separate")


def test_a_warmup_that_does_not_fit_is_said(config, tmp_path):
    lines = []
    config = replaced(config, steps=6, optimizer__warmup_steps=9)
    run = prepare_run(config, tmp_path / "run", lines.append)
    assert run.config.optimizer.warmup_steps == 1
    assert "warm-up: 1 of the 6 steps, because 9 steps do not fit" in lines


def test_a_vocabulary_larger_than_the_model_is_said(config, tmp_path):
    lines = []
    run = prepare_run(replaced(config, model__vocab_size=9), tmp_path / "run", lines.append)
    size = run.tokenizer.vocab_size
    assert run.config.model.vocab_size == size
    assert f"model.vocab_size 9 is too small for the vocabulary: the model has {size}" in lines
