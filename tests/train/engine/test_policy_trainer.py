"""Reinforcement learning as a run like any other."""

import json
import shutil

import numpy as np
import pytest
import tokenizers
from flaxzoo import data, models, train
from flaxzoo.train.evaluation.score_policy import ends_of_answers
from flaxzoo.train.runs.samples import read_samples

from ...support.objective_runs import RUNS
from ...support.run_folders import assert_same, everything, lines

METRICS = {
    *("reward", "reward_std", "frac_reward_zero_std", "rewards/exact_match/mean", "loss"),
    *("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    *("completions/mean_length", "completions/clipped_ratio"),
    "completions/mean_terminated_length",
}


ASKED = data.Examples.of(
    [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in (1, 4, 9) for b in (2, 7, 8)]
)
"""Nine prompts, which do not fill two batches."""


def configured(*, kind=train.GRPOConfig, settings=None, **fields):
    given = {"rewards": ("exact_match",), "max_new_tokens": 4, "beta": 0.1, "num_generations": 4}
    usual = {
        "optimizer": train.OptimizerConfig(
            peak_learning_rate=1e-2, warmup_steps=0, weight_decay=0.0
        ),
        **{"steps": 4, "batch_size": 8, "log_every": 1, "checkpoint_every": 2},
        "evaluate_every": 2,
    }
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "dropout_rate": 0.1}
    return train.TrainConfig(
        model=models.GPTConfig(vocab_size=1, max_length=12, **sizes),
        data=data.PolicyData(
            source="builtin:sums",
            validation=ASKED,
            length=9,
            tokenizer=data.TokenizerConfig(kind="characters"),
        ),
        objective=kind(**given | (settings or {})),
        **{**usual, **fields},
    )


class Stop(Exception):
    pass


class StopAfter(train.Callback):
    """Fails after a step, so that the run stops there and can be resumed."""

    def __init__(self, step):
        self.last = step

    def on_step(self, step, metrics):
        if step == self.last:
            raise Stop


SEVERAL = {"num_iterations": 2, "num_mini_batches": 2}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo") / "run"
    return train.train(configured(settings=SEVERAL), folder, quiet=True), folder


@pytest.mark.slow
def test_metrics_have_the_names_of_trl(whole_run):
    result, folder = whole_run
    rows = [json.loads(line) for line in lines(folder)]
    steps = [row for row in rows if row["split"] == "train"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row.keys() >= METRICS for row in steps)
    scores = result.validation
    assert scores["loss"] == -scores["reward"]
    assert scores["prompts"] == 9
    assert "kl" in scores
    assert 1 <= scores["completions/mean_length"] <= 4
    assert [row["step"] for row in rows if row["split"] == "validation"] == [0, 2, 4]
    samples = read_samples(folder)
    assert [row["step"] for row in samples] == [0] * 8 + [2] * 8 + [4] * 8
    assert samples[0]["prompt"] == "1+2="
    assert samples[0].keys() == {"step", "prompt", "completion", "reward"}
    again = train.score_run(folder, ASKED, log=lambda _: None)
    assert again == pytest.approx({name: scores[name] for name in again})
    report = (folder / "report.md").read_text()
    assert "## Answers before training" in report
    assert f"| {samples[-1]['prompt']} | {samples[-1]['completion']} |" in report


@pytest.mark.slow
def test_a_resumed_run_is_the_run_never_stopped(whole_run, tmp_path):
    config = configured(settings=SEVERAL)
    with pytest.raises(Stop):
        train.train(config, tmp_path / "run", quiet=True, callbacks=[StopAfter(1)])
    train.train(config, tmp_path / "run", quiet=True)
    assert_same(everything(tmp_path / "run", 4), everything(whole_run[1], 4))
    assert lines(tmp_path / "run") == lines(whole_run[1])
    assert read_samples(tmp_path / "run") == read_samples(whole_run[1])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["rloo", "ppo"])
def test_a_run_that_was_killed_is_the_run_never_stopped(algorithm, tmp_path, on_one_device):
    """With the references and, for ppo, the head of values and its moments."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    config = RUNS[algorithm](tmp_path, steps=2, log_every=1, evaluate_every=2, checkpoint_every=1)
    train.train(config, whole, quiet=True)
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "checkpoints" / "2")
    (killed / "report.md").unlink()
    train.train(config, killed, quiet=True)
    ours, theirs = everything(killed, 2), everything(whole, 2)
    assert_same(ours, theirs)
    assert any("head" in name for name in ours) == (algorithm == "ppo")
    assert lines(killed) == lines(whole)
    assert read_samples(killed) == read_samples(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
def test_eight_devices_train_the_same_policy(whole_run, tmp_path):
    train.train(configured(settings=SEVERAL), tmp_path / "run", quiet=True)
    ours, theirs = (everything(folder, 4) for folder in (tmp_path / "run", whole_run[1]))
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_constant_reward_leaves_the_policy_where_it_was(tmp_path):
    config = configured(settings={"rewards": (), "beta": 0.0}, steps=2)

    def constant(completions):
        return [0.5] * len(completions)

    class First(train.Callback):
        norms: list[float] = []  # noqa: RUF012

        def on_step(self, step, metrics):
            self.norms.append(metrics["gradient_norm"])

    first = First()
    result = train.train(
        config, tmp_path / "run", quiet=True, rewards=[constant], callbacks=[first]
    )
    assert result.validation["rewards/constant/mean"] == 0.5
    assert first.norms == [0.0, 0.0]


def wrong_length(completions):
    return [0.0]


def no_number(completions):
    return ["good"] * len(completions)


def broken(completions):
    raise LookupError("mine")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "at"), [(broken, "training"), (wrong_length, "evaluation"), (no_number, "training")]
)
def test_a_reward_that_fails_leaves_the_last_finished_step(tmp_path, capsys, fault, at):
    config = configured(settings={"rewards": ()}, evaluate_every=3, checkpoint_every=100)
    batch_sizes, is_repaired = [], []

    def reward(completions):
        # A step has 32 answers, an evaluation two batches of 8.
        batch_sizes.append(len(completions))
        steps = batch_sizes.count(32)
        fails = steps == 4 if at == "training" else steps == 3 and len(completions) < 32
        return (fault if fails and not is_repaired else half)(completions)

    def half(completions):
        return [0.5] * len(completions)

    error = LookupError if fault is broken else data.UserError
    with pytest.raises(error, match="mine" if fault is broken else "the reward reward"):
        train.train(config, tmp_path / "run", rewards=[reward])
    shown = " ".join(capsys.readouterr().err.split())
    assert f"{error.__name__}: " in shown
    assert "reward reward): saved step 3" in shown
    assert [json.loads(x)["step"] for x in lines(tmp_path / "run") if '"train"' in x] == [1, 2, 3]
    if fault is not broken:
        return
    is_repaired.append(True)
    train.train(config, tmp_path / "run", quiet=True, rewards=[reward])
    train.train(config, tmp_path / "whole", quiet=True, rewards=[reward])
    assert_same(everything(tmp_path / "run", 4), everything(tmp_path / "whole", 4))
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


@pytest.mark.slow
def test_ppo_learns_values_and_exports_a_language_model(tmp_path):
    config = configured(
        kind=train.PPOConfig,
        settings={"num_generations": 1, "num_iterations": 2},
        steps=2,
        lora=models.LoRAConfig(rank=2),
        init_from=str(tmp_path / "base"),
    )
    base = train.TrainConfig(
        model=config.model,
        data=data.CausalLMData(
            source="builtin:sums", length=12, tokenizer=config.data.tokenizer, packing="first-fit"
        ),
        optimizer=config.optimizer,
        **{"steps": 1, "batch_size": 8},
    )
    train.train(base, tmp_path / "base", quiet=True)
    result = train.train(config, tmp_path / "run", quiet=True)
    rows = [json.loads(line) for line in lines(tmp_path / "run")]
    (first, second) = [row for row in rows if row["split"] == "train"]
    assert first.keys() >= PPO_METRICS
    # Adapters begin at zero: the policy is its reference, and leaves it.
    assert abs(first["objective/kl"]) < 1e-5 < abs(second["objective/kl"])
    assert result.validation["prompts"] == 9
    train.export_model(tmp_path / "run", tmp_path / "hf")
    model, params = models.load(tmp_path / "hf")
    assert model.config.head == "causal_lm"
    assert "head" not in params


PPO_METRICS = {
    *("objective/kl", "objective/entropy", "objective/scores", "objective/rlhf_reward"),
    *("objective/non_score_reward", "policy/approxkl_avg", "policy/clipfrac_avg"),
    *("policy/entropy_avg", "loss/policy_avg", "loss/value_avg", "val/clipfrac_avg"),
    *("val/ratio", "val/num_eos_tokens", "reward"),
}


def test_an_answer_in_a_dialogue_ends_with_its_turn(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, ":": 1, "b": 2}, []))
    backend.add_special_tokens(["<eos>", "<turn>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = "{% for m in messages %}:{{ m.content }}<turn>{% endfor %}"
    template += "{% if add_generation_prompt %}:{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = data.load_tokenizer(tmp_path)
    for prompt, ends in (([{"role": "user", "content": "a"}], (3, 4)), ("a", (3,))):
        source = data.Examples.of([{"prompt": prompt}])
        policy = data.PolicyData(source=source, length=9, tokenizer=data.TokenizerConfig())
        examples = policy.whole_source(source, tokenizer, ()).examples
        assert ends_of_answers(tokenizer, examples) == ends
