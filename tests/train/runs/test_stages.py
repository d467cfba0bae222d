"""A run gets stages: more steps, with other settings from then on."""

import dataclasses
import json
import re
import shutil

import pytest
from flaxzoo import models, train
from flaxzoo.data.common.errors import RunError, UserError
from flaxzoo.data.mixture import MixedExamples
from flaxzoo.train.cli import main as cli
from flaxzoo.train.runs.custom import Custom
from flaxzoo.train.runs.load_run import config_of_run
from flaxzoo.train.runs.run_folder import create_folder, prepare_run
from flaxzoo.train.runs.stages import earlier_stages

from tests.support.run_folders import WORDS, assert_same, everything, lines, small_run

pytestmark = pytest.mark.usefixtures("on_one_device")

CONSTANT = train.OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=3, schedule="constant")
SECOND = {
    "steps": 8,
    "batch_size": 16,
    "optimizer": dataclasses.replace(CONSTANT, schedule="linear", final_fraction=0.0),
}


class Stop(train.Callback):
    """Ends a run with an error after a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, step, metrics):
        if step == self.step:
            raise ZeroDivisionError


def config_with(config, **fields):
    return dataclasses.replace(config, **fields)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The configuration and the folder of a run of four steps at a constant rate."""
    folder = tmp_path_factory.mktemp("stages")
    config = small_run(folder, steps=4, optimizer=CONSTANT, checkpoint_every=100)
    train.train(config, folder / "run", quiet=True)
    return config, folder / "run"


@pytest.fixture
def run(first, tmp_path):
    """A copy of the run."""
    shutil.copytree(first[1], tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.slow
def test_more_steps_alone_equal_a_longer_run(first, run, tmp_path):
    longer = config_with(first[0], steps=8)
    train.train(longer, run, extend=True, quiet=True)
    train.train(longer, tmp_path / "whole", quiet=True)
    assert_same(everything(run, 8), everything(tmp_path / "whole", 8))
    steps = [line for line in lines(run) if '"train"' in line]
    assert steps == [line for line in lines(tmp_path / "whole") if '"train"' in line]


@pytest.mark.slow
def test_a_stage_without_a_checkpoint_is_not_what_the_next_one_continues(first, run):
    longer, log = config_with(first[0], steps=8), lambda line: None
    direct = prepare_run(longer, run, log, Custom(), extend=True).stated
    assert direct.stage is not None
    assert (direct.stage.start, direct.stage.schedule_start) == (4, 0)
    # This stage takes no step.
    other = config_with(first[0], **SECOND)
    create_folder(prepare_run(other, run, log, Custom(), extend=True))
    assert config_of_run(run).batch_size == 16
    again = prepare_run(longer, run, log, Custom(), extend=True)
    assert again.stated == direct
    create_folder(again)
    assert config_of_run(run).stage == direct.stage
    assert [x["end"] for x in earlier_stages(run)] == [4]


@pytest.mark.slow
def test_a_stage_with_other_settings_resumes_bit_for_bit(first, run, tmp_path):
    shutil.copytree(run, tmp_path / "whole")
    second = config_with(first[0], **SECOND)
    train.train(second, tmp_path / "whole", extend=True, quiet=True)
    with pytest.raises(ZeroDivisionError):
        train.train(second, run, extend=True, quiet=True, callbacks=[Stop(6)])
    # The same call resumes the stage, and so does a call with the stored configuration.
    assert train.train(config_of_run(run), run, quiet=True).finished
    assert train.train(second, run, extend=True, quiet=True).step == 8
    assert_same(everything(run, 8), everything(tmp_path / "whole", 8))
    # The rate falls linearly over the stage, without a second warm-up.
    rates = [json.loads(x)["learning_rate"] for x in lines(run) if '"train"' in x]
    assert rates[3:] == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2, 0.0], abs=1e-9)
    stages = json.loads((run / "config.json").read_text())["stages"]
    assert [(x["start"], x["end"], x["train"]["batch_size"]) for x in stages] == [(0, 4, 8)]
    assert config_of_run(run).stage == train.Stage(start=4, examples=32, schedule_start=4)
    report = (run / "report.md").read_text()
    changes = "optimizer.schedule constant → linear, optimizer.final_fraction 0.1 → 0.0, batch_size"
    assert f"| stage 2 | steps 5 to 8: {changes} 8 → 16 |" in report
    assert "| steps | 8, the last 4 of 16 × 16 tokens |" in report
    # Everything that takes a run takes this one.
    assert train.score_run(run)["loss"] > 0
    train.export_model(run, tmp_path / "exported")
    assert models.load(tmp_path / "exported")


@pytest.mark.slow
def test_the_decay_of_wsd_as_a_stage_equals_a_single_run(first, run, tmp_path):
    falls = {"final_fraction": 0.0, "decay_fraction": 0.5}
    decay, wsd = (
        config_with(first[0], steps=8, optimizer=dataclasses.replace(CONSTANT, schedule=x, **falls))
        for x in ("linear", "wsd")
    )
    train.train(decay, run, extend=True, quiet=True)
    train.train(wsd, tmp_path / "whole", quiet=True)
    assert_same(everything(run, 8), everything(tmp_path / "whole", 8))
    assert lines(run)[-1] == lines(tmp_path / "whole")[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"d_model": 32}}, "model.d_model .*16 → 32"),
        ({"data": {"tokenizer": {"kind": "words"}}}, "data.tokenizer.kind .*change"),
        ({"optimizer": {"name": "lamb"}}, "optimizer.name .*change"),
        ({"optimizer": {"ema_decay": 0.9}}, "optimizer.ema_decay .*None → 0.9"),
        ({"seed": 1}, "seed .*change"),
        ({"steps": 4, "batch_size": 4}, "above 4, .*got 4"),
    ],
)
def test_what_cannot_change_is_named(first, changes, message):
    def changed(record, fields):
        values = {
            name: changed(getattr(record, name), x) if isinstance(x, dict) else x
            for name, x in fields.items()
        }
        return dataclasses.replace(record, **values)

    with pytest.raises(RunError, match=message):
        train.train(changed(first[0], {"steps": 8, **changes}), first[1], extend=True, quiet=True)
    with pytest.raises(RunError, match="extend"):
        train.train(first[0], first[1].parent / "none", extend=True, quiet=True)


def test_a_stage_that_does_not_resume_leaves_the_run_as_it_is(first):
    before = (first[1] / "config.json").read_bytes()
    longer = dataclasses.replace(first[0], steps=8)
    with pytest.raises(UserError, match=r"extend .*resume"):
        train.train(longer, first[1], extend=True, resume=False, quiet=True)
    assert (first[1] / "config.json").read_bytes() == before


@pytest.mark.slow
def test_a_stage_with_shorter_texts_begins_at_its_first_example(first, tmp_path):
    logged = []
    data = dataclasses.replace(first[0].data, length=first[0].data.length // 2)
    second = config_with(first[0], **SECOND, data=data)
    assert prepare_run(second, first[1], logged.append, extend=True).stated.stage.examples == 0
    # A stage has no warm-up of its own.
    assert not any("warm-up" in line for line in logged)
    # The settings of an extended run begin a new run without a stage.
    staged = config_with(first[0], stage=train.Stage(start=4, examples=32))
    assert prepare_run(staged, tmp_path / "new", logged.append).stated.stage is None


@pytest.mark.slow
def test_sources_that_two_stages_have_continue(tmp_path):
    """Sources join and leave a mixture, and weights change; other sources do not begin again."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{x} {name} ran" for x in WORDS * 9))
    a, b, c = (f"text:{tmp_path / name}.txt#block" for name in "abc")
    config, run = small_run(tmp_path, steps=4, optimizer=CONSTANT), tmp_path / "run"
    validation = config.data.source
    read = dict.fromkeys((a, b, c), 0)
    sources = (a, f"0.5*{a} + 0.5*{b}", f"0.8*{b} + 0.2*{c}", f"0.2*{c} + 0.8*{b}", b)
    for stage, source in enumerate(sources, 1):
        changed = dataclasses.replace(config.data, source=source, validation=validation)
        longer = config_with(config, steps=4 * stage, data=changed)
        begun = prepare_run(longer, run, lambda line: None, Custom(), extend=stage > 1)
        train.train(longer, run, extend=stage > 1, quiet=True)
        examples, settings = begun.train.examples, begun.config
        if isinstance(examples, MixedExamples):
            for index, part in enumerate(examples.parts):
                numbers = (examples.locate(g) for g in range(99))
                assert next(x for i, x in numbers if i == index) == read[part.name]
            counts = zip(examples.parts, examples.counts(4 * config.batch_size), strict=True)
            read |= {part.name: read[part.name] + count for part, count in counts}
        else:
            before = settings.stage.examples if settings.stage else 0
            assert before == read[source]
            read[source] += 4 * config.batch_size
    assert min(read.values()) > 0


@pytest.mark.slow
def test_the_command_extends_a_run_with_other_data(run, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("\n\n".join(f"{x} red dogs ran away" for x in WORDS))
    words = f"--extend-to 6 --data.source text:{tmp_path / 'other.txt'}#block"
    assert cli.main(["train", str(run), *words.split()]) == 0
    shown = "".join(capsys.readouterr().err.split())
    assert re.search(r"steps5to6:\S*data\.source\S*→\S*other\.txt", shown)
    stage = config_of_run(run).stage
    # Other data begin at their first example, and an unchanged schedule goes on.
    assert stage == train.Stage(start=4, examples=0, schedule_start=0, warmup=3)
    assert cli.main(["train", str(run), "--extend-to", "6", "--steps", "7"]) == 2
    assert "leave --steps out" in capsys.readouterr().err
    assert cli.main(["train", str(run), "--steps", "7"]) == 2
    assert f"flaxzoo train {run} --extend-to STEPS" in capsys.readouterr().err
