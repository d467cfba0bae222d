"""`train.train` with an objective, examples and callbacks of the caller's own."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.train.cli.main import main
from flaxzoo.train.engine import start
from flaxzoo.train.engine.loop import Loop
from flaxzoo.train.runs.custom import Custom, check_custom
from flaxzoo.train.runs.run_folder import prepare_run

from ...support.devices import on_devices
from ...support.encoders import VOCABULARY, WORDS, fine_tuning

LENGTH = 16
TEXTS = [" ".join(WORDS[i:] + WORDS[:i])[: 20 + i] for i in range(len(WORDS))]


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Each sentence alone, cut to `LENGTH` tokens."""

    ids: tuple[tuple[int, ...], ...]

    @property
    def num_examples(self):
        return len(self.ids)

    def example(self, epoch, index):
        row = np.zeros(LENGTH, np.int32)
        ids = self.ids[index][:LENGTH]
        row[: len(ids)] = ids
        return {"input_ids": row, "attention_mask": (np.arange(LENGTH) < len(ids)).astype(np.int32)}


def sentences(tokenizer):
    ids = tuple(tuple(tokenizer.encode(text)) for text in TEXTS)
    return Sentences(ids), Sentences(ids[:5])


def is_real(batch):
    return (batch["attention_mask"][:, 0] != 0).astype(jnp.float32)


def contrastive_terms(outputs, batch):
    """Unsupervised SimCSE: a sentence under other dropout, among those of the batch."""
    first, second = (x.last_hidden_state[:, 0] for x in outputs)  # [B, D]
    unit = [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (first, second)]
    similarity = jnp.where(is_real(batch)[None] > 0, unit[0] @ unit[1].T / 0.05, -1e9)  # [B, B]
    own = jnp.diagonal(jax.nn.log_softmax(similarity))
    right = jnp.argmax(similarity, axis=1) == jnp.arange(len(own))
    return {"pair": -jnp.sum(own * is_real(batch)), "accuracy": jnp.sum(right * is_real(batch))}


CONTRASTIVE = train.Objective(
    coefficients={"pair": 1.0},
    inputs=lambda batch: ({n: batch[n] for n in ("input_ids", "attention_mask")},) * 2,
    counts=lambda batch: dict.fromkeys(("pair", "accuracy"), jnp.sum(is_real(batch))),
    terms=contrastive_terms,
    whole_batch=True,
)


def focal_terms(outputs, batch):
    """Lin et al. 2017, equation 4, with γ = 2."""
    labels = batch["labels"][:, None]
    log_p = jnp.take_along_axis(jax.nn.log_softmax(outputs.logits), labels, axis=1)[:, 0]
    focal = -jnp.square(1 - jnp.exp(log_p)) * log_p
    usual = train.CLASSIFICATION.terms(outputs, batch)
    return {**usual, "label": jnp.sum(focal * is_real(batch))}


FOCAL = dataclasses.replace(train.CLASSIFICATION, terms=focal_terms)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    sizes = {"vocab_size": 1, "max_length": LENGTH, "num_layers": 1, "d_model": 16, "num_heads": 2}
    return train.TrainConfig(
        model=models.BertConfig(**sizes, head="none"),
        data=data.CausalLMData(
            source=f"text:{folder}/texts.txt#line",
            length=LENGTH,
            tokenizer=data.TokenizerConfig(kind="wordpiece", vocab_size=64),
        ),
        optimizer=train.OptimizerConfig(
            peak_learning_rate=1e-2, beta2=0.999, epsilon=1e-3, warmup_steps=1
        ),
        batch_size=8,
        steps=6,
        evaluate_every=2,
        checkpoint_every=2,
    )


@pytest.fixture
def one_device():
    with on_devices(1):
        yield


def test_an_objective_that_counts_filler_is_warned_of(config, tmp_path):
    wrong = dataclasses.replace(
        CONTRASTIVE, counts=lambda batch: dict.fromkeys(("pair", "accuracy"), jnp.float32(8))
    )
    lines = []
    for objective in (CONTRASTIVE, wrong):
        run = prepare_run(config, tmp_path / "run", lines.append, Custom(objective, sentences))
        start._warn_of_counted_filler(run, objective, lines.append)
    (warned,) = [line for line in lines if "fill up" in line]
    assert "3 examples of zeros" in warned
    assert "counts['pair'] " in warned


def contrast(config, folder, **settings):
    given = {"objective": CONTRASTIVE, "examples": sentences, "quiet": True, **settings}
    return train.train(config, folder, **given)


def params_of(folder):
    return jax.tree.map(np.asarray, models.load(folder)[1])


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    return True


def records(folder, split):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


@dataclasses.dataclass
class Recorder(train.Callback):
    fail_at: int = 0
    calls: list = dataclasses.field(default_factory=list)

    def on_step(self, step, metrics):
        self.calls.append(("step", step))
        assert np.isfinite(metrics["loss"])
        if step == self.fail_at:
            raise LookupError("mine")

    def on_evaluation(self, step, metrics):
        self.calls.append(("evaluation", step))
        assert metrics["loss"] > 0

    def on_checkpoint(self, step, folder):
        self.calls.append(("checkpoint", step))
        assert (folder / "checksums.json").is_file()
        assert folder.name == str(step)


def returning(function, change):
    """The objective with something else returned from one of its functions."""
    own = getattr(CONTRASTIVE, function)

    def changed(*arguments):
        return change(own(*arguments))

    return dataclasses.replace(CONTRASTIVE, **{function: changed})


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        ("terms", lambda x: {"accuracy": x["accuracy"]}, r"terms .* without \['pair'\]"),
        ("terms", lambda x: {**x, "extra": x["pair"]}, r"'extra'.* counts"),
        ("terms", lambda x: {**x, "pair": x["pair"][None]}, r"terms\['pair'\] .* \(1,\)"),
        ("terms", lambda x: {**x, "pair": None}, r"terms\['pair'\] .*NoneType"),
        ("terms", lambda x: x["pair"], "terms .*returned"),
        ("terms", lambda x: {}, r"nothing without \['pair'\]"),
        ("counts", lambda x: {"accuracy": x["accuracy"]}, r"counts .* without \['pair'\]"),
        ("counts", lambda x: {"pair": x["pair"]}, r"'accuracy'.* counts"),
        ("counts", lambda x: {**x, "pair": jnp.ones(8)}, r"counts\['pair'\] .* \(8,\)"),
    ],
)
def test_terms_that_do_not_suit_the_coefficients_are_named(
    config, tmp_path, one_device, function, change, message
):
    with pytest.raises(UserError, match=message):
        contrast(config, tmp_path / "run", objective=returning(function, change))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["data", "validation"])
def test_examples_that_fail_leave_the_last_finished_step(
    config, tmp_path, one_device, capsys, what
):
    def failing(tokenizer):
        training, validation = sentences(tokenizer)
        requested = []

        class Failing(Sentences):
            def example(self, epoch, index):
                requested.append(index)
                limit = 400 if what == "data" else 30
                if len(requested) > limit:
                    raise LookupError("mine")
                return super().example(epoch, index)

        if what == "data":
            return Failing(training.ids), validation
        return training, Failing(validation.ids)

    failing.__name__ = "sentences"
    settings = {"steps": 100, "checkpoint_every": 1000, "evaluate_every": 5}
    longer = dataclasses.replace(config, **settings)
    with pytest.raises(LookupError, match="mine"):
        contrast(longer, tmp_path / "run", examples=failing, quiet=False)
    shown = capsys.readouterr().err
    (saved,) = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert f"saved step {saved}" in shown
    assert "LookupError: mine" in shown
    assert contrast(dataclasses.replace(longer, evaluate_every=50), tmp_path / "run").finished


@pytest.mark.slow
def test_a_contrastive_run_resumes_bit_for_bit_after_a_callback_failed(
    config, tmp_path, one_device, capsys
):
    whole = contrast(config, tmp_path / "whole", callbacks=[seen := Recorder()])
    assert whole.finished
    assert set(whole.validation) == {"loss", "pair", "accuracy"}
    assert [x for x in seen.calls if x[0] != "step"] == [
        (what, step) for step in (2, 4, 6) for what in ("evaluation", "checkpoint")
    ]
    assert [step for what, step in seen.calls if what == "step"] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(LookupError, match="mine"):
        contrast(config, tmp_path / "broken", callbacks=[Recorder(fail_at=3)])
    saved = max(int(p.name) for p in (tmp_path / "broken" / "checkpoints").iterdir())
    assert saved in (3, 4)  # the step that was being taken is finished
    assert contrast(config, tmp_path / "broken").finished
    assert same(params_of(tmp_path / "broken"), params_of(tmp_path / "whole"))
    # What it is for: vectors, and a report that says what was learned.
    (tmp_path / "in.txt").write_text("the cat\na dog\n")
    files = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.npy")]
    assert main(["embed", str(tmp_path / "whole"), *files]) == 0
    report = (tmp_path / "whole" / "report.md").read_text()
    assert "| own objective | contrastive_terms (pair 1.0) |" in report
    assert "| own examples | sentences |" in report
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "whole")]) == 2
    refusal = capsys.readouterr().err
    assert "sentences" in refusal
    assert "metrics.jsonl" in refusal


@pytest.mark.slow
def test_eight_devices_learn_what_one_learns(config, tmp_path):
    losses = {}
    for name, mesh in (
        ("one", None),
        ("data", train.MeshConfig(data=8)),
        ("fsdp, tensor", train.MeshConfig(data=1, fsdp=4, tensor=2)),
    ):
        with on_devices(8 if mesh else 1):
            changed = dataclasses.replace(config, log_every=1, mesh=mesh or train.MeshConfig())
            contrast(changed, tmp_path / name)
        rows = records(tmp_path / name, "train") + records(tmp_path / name, "validation")
        losses[name] = [row["loss"] for row in rows]
    assert len(losses["one"]) == 9
    for name in ("data", "fsdp, tensor"):
        np.testing.assert_allclose(losses[name], losses["one"], rtol=2e-4)


def test_an_objective_that_needs_the_whole_batch_refuses_pmap(config, tmp_path):
    with pytest.raises(UserError, match=r"compares .*examples"):
        contrast(dataclasses.replace(config, batch_size=16, parallel="pmap"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_resumes_only_with_its_objective_and_examples(config, tmp_path, one_device):
    config = dataclasses.replace(config, steps=2)
    contrast(config, tmp_path / "run")
    with pytest.raises(train.RunError, match=r"contrastive_terms \(.*\), .*objective=…"):
        contrast(config, tmp_path / "run", objective=None)
    with pytest.raises(train.RunError, match=r"sentences, .*examples=…"):
        contrast(config, tmp_path / "run", examples=None)
    with pytest.raises(train.RunError, match=r"contrastive_terms \(.*\), got"):
        contrast(config, tmp_path / "run", objective=FOCAL)
    doubled = {name: 2 * x for name, x in CONTRASTIVE.coefficients.items()}
    with pytest.raises(train.RunError, match=r"contrastive_terms .*, got contrastive_te"):
        contrast(
            config,
            tmp_path / "run",
            objective=dataclasses.replace(CONTRASTIVE, coefficients=doubled),
        )

    def sentences(tokenizer):  # of the same name
        return Sentences(((5, 6), (6, 7))), Sentences(((5, 6),))

    with pytest.raises(train.RunError, match=r"sentences .*changed"):
        contrast(config, tmp_path / "run", examples=sentences)


@pytest.mark.slow
def test_a_focal_loss_in_micro_batches(work_folder, tmp_path, one_device, capsys):
    base = dataclasses.replace(fine_tuning(work_folder, "one"), epochs=0.0, steps=4, log_every=1)
    losses = {}
    for parts in (1, 2):
        split = dataclasses.replace(base, micro_batches=parts)
        result = train.train(split, tmp_path / str(parts), objective=FOCAL, quiet=True)
        assert set(result.validation) == {"loss", "label", "accuracy"}
        losses[parts] = [row["loss"] for row in records(tmp_path / str(parts), "train")]
    np.testing.assert_allclose(losses[1], losses[2], rtol=1e-4)
    # At the beginning both labels are about as probable: (1 - p)² is about a quarter.
    assert losses[1][0] == pytest.approx(np.log(2) / 4, rel=0.3)
    lines = []
    scores = train.score_run(tmp_path / "1", log=lines.append)
    assert {"loss", "accuracy", "f1"} <= scores.keys()
    assert any("focal_terms" in line and "classification" in line for line in lines)
    assert main(["export", str(tmp_path / "1"), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| own objective | focal_terms (label 1.0) |" in card
    assert "objective.kind" not in card
    (tmp_path / "in.txt").write_text("the cat sat\n")
    assert main(["predict", str(tmp_path / "1"), "--input", str(tmp_path / "in.txt")]) == 0
    with pytest.raises(train.RunError, match="focal_terms"):
        train.train(base, tmp_path / "1", quiet=True)
    capsys.readouterr()
    assert main(["train", str(tmp_path / "1"), "--extend-to", "6"]) == 2
    message = capsys.readouterr().err
    assert "focal_terms" in message
    assert "None" not in message


@pytest.mark.parametrize(
    ("name", "given", "got"),
    [
        ("objective", focal_terms, "function"),
        ("examples", Sentences(()), "Sentences"),
        ("callbacks", [train.Callback], "type"),
        ("callbacks", train.Callback(), "Callback"),
        ("rewards", focal_terms, "function"),
        ("rewards", ["exact_match"], "str"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(name, given, got):
    right = {"objective": None, "examples": None, "callbacks": (), "rewards": ()}
    check_custom(**right)
    with pytest.raises(UserError, match=f"{name} must .*{got}"):
        check_custom(**{**right, name: given})


class Noisy(Sentences):
    def example(self, epoch, index):
        made = super().example(epoch, index)
        return {**made, "input_ids": np.random.default_rng().integers(1, 99, LENGTH, np.int32)}


class Listed(Sentences):
    def example(self, epoch, index):
        return {name: x.tolist() for name, x in super().example(epoch, index).items()}


class Empty(Sentences):
    @property
    def num_examples(self):
        return 0


class Ragged(Sentences):
    def example(self, epoch, index):
        return {name: x[: LENGTH - index] for name, x in super().example(epoch, index).items()}


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Noisy, "input_ids .*example 0 .*differs"),
        (Listed, "input_ids .*example 0 .*list"),
        (Ragged, "example 1 .*example 0"),
        (Empty, "num_examples .*got 0"),
    ],
)
def test_examples_that_cannot_be_trained_on_are_refused(cls, message):
    source, tokenizer = cls(((5, 6), (6, 7))), data.train_tokenizer(TEXTS, VOCABULARY)
    with pytest.raises(train.RunError, match=message):
        Custom(examples=lambda _: (source, source)).splits(tokenizer)


class Unknown(Sentences):
    def example(self, epoch, index):
        return {**super().example(epoch, index), "score": np.array(np.nan, np.float32)}


def test_nan_equals_itself_when_an_example_is_made_again():
    source, tokenizer = Unknown(((5, 6), (6, 7))), data.train_tokenizer(TEXTS, VOCABULARY)
    training, _ = Custom(examples=lambda _: (source, source)).splits(tokenizer)
    assert training.examples is source


def test_callbacks_cannot_read_parameters_that_are_sharded_over_processes():
    """Adapters are not merged first, because one process would wait for the others."""
    loop = Loop.__new__(Loop)
    loop.config = dataclasses.replace(train.recipe("quickstart"), lora=models.LoRAConfig())
    tokenizer = data.train_tokenizer(TEXTS, VOCABULARY)
    loop.run = types.SimpleNamespace(tokenizer=tokenizer)
    elsewhere = types.SimpleNamespace(is_fully_addressable=False, is_fully_replicated=False)
    loop.state = types.SimpleNamespace(params={}, frozen={"kernel": elsewhere}, step=1)
    with pytest.raises(UserError, match="on_checkpoint"):
        loop._running_model().params()
