"""Runs on prepared rows are those on the text, stopped or not."""

import dataclasses
import json
import shutil

import pytest
from flaxzoo import data, train

from ...support.run_folders import assert_same, everything, kept, lines, small_run

pytestmark = pytest.mark.usefixtures("on_one_device")

STEPS = 4


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """A run on a text that is one document, and the same on its prepared rows."""
    work_folder = tmp_path_factory.mktemp("work")
    run = small_run(work_folder, steps=STEPS, evaluate_every=4, checkpoint_every=2)
    letters = work_folder / "letters"
    run.data.make_tokenizer().save(letters)
    source = f"text:{work_folder}/text.txt"
    data.prepare(
        source, work_folder / "rows", letters, length=16, packing="first-fit", validation_fraction=0
    )
    plain = dataclasses.replace(
        run.data,
        source=source,
        validation=run.data.source,
        validation_fraction=0.0,
        packing="first-fit",
        tokenizer=data.TokenizerConfig(path=str(letters)),
    )
    prepared = dataclasses.replace(plain, source=f"prepared:{work_folder}/rows")
    return [dataclasses.replace(run, data=kind) for kind in (plain, prepared)]


def numbers(workdir):
    """The metrics, without what tells the time."""
    rows = map(json.loads, lines(workdir))
    return [
        {name: row[name] for name in row if "second" not in name and "time" not in name}
        for row in rows
    ]


@pytest.mark.slow
def test_the_run_is_that_on_the_text_also_when_taken_up(configs, tmp_path):
    folders = [tmp_path / "text", tmp_path / "prepared"]
    for config, folder in zip(configs, folders, strict=True):
        assert train.train(config, folder, quiet=True).finished
    on_text, on_rows = folders
    assert_same(everything(on_text, STEPS), everything(on_rows, STEPS))
    ours, theirs = ([row.get("loss") for row in numbers(folder)] for folder in folders)
    assert ours == theirs
    assert len(ours) > STEPS
    stopped = tmp_path / "stopped"
    shutil.copytree(on_rows, stopped)
    shutil.rmtree(stopped / "checkpoints" / str(STEPS))
    assert kept(stopped) == [2]
    assert train.train(configs[1], stopped, quiet=True).finished
    assert_same(everything(stopped, STEPS), everything(on_rows, STEPS))


def test_a_shard_that_is_gone_ends_a_run_before_it_begins(configs, tmp_path):
    rows = shutil.copytree(configs[1].data.source.removeprefix("prepared:"), tmp_path / "rows")
    next(rows.rglob("train.array_record")).unlink()
    joined_data = dataclasses.replace(configs[1].data, source=f"prepared:{rows}")
    config = dataclasses.replace(configs[1], data=joined_data)
    with pytest.raises(data.DataError, match=r"train\.array_record .*missing"):
        train.train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
