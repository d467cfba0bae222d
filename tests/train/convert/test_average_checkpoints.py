"""The mean of the last checkpoints, and what may be done with it."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data import CausalLMData, TokenizerConfig
from flaxzoo.train.convert.average_checkpoints import average_checkpoints
from flaxzoo.train.runs.run_folder import prepare_run

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def ended(train_config, tmp_path_factory):
    """A run with the checkpoints 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("average") / "run"
    (folder.parent / "text.txt").write_text(
        "\n\n".join(f"the cat sat on mat {i}" for i in range(40))
    )
    config = train_config(
        keep_last=3,
        data=CausalLMData(
            source=f"text:{folder.parent}/text.txt#block",
            validation_fraction=0.2,
            length=16,
            tokenizer=TokenizerConfig(kind="characters"),
        ),
    )
    train.train(config, folder, quiet=True)
    return config, folder


@pytest.mark.slow
def test_the_mean_of_the_last_two(ended, tmp_path):
    _, folder = ended
    assert average_checkpoints(folder, tmp_path / "mean", last=2) == [2, 3]
    second, third = (models.load(folder, step=step)[1] for step in (2, 3))
    _, mean = models.load(tmp_path / "mean")
    for a, b, m in zip(*map(jax.tree.leaves, (second, third, mean)), strict=True):
        np.testing.assert_allclose(m, (np.float64(a) + np.float64(b)) / 2, rtol=1e-7)
    different = [
        np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (second, third)), strict=True)
    ]
    assert any(different)


def test_the_mean_of_one_is_itself_and_scores_alike(ended, tmp_path):
    _, folder = ended
    average_checkpoints(folder, tmp_path / "mean", last=1)
    lines = []
    assert train.score_run(tmp_path / "mean", log=lines.append) == train.score_run(
        folder, log=lines.append
    )


@pytest.mark.slow
def test_averaged_checkpoints_are_begun_with_and_not_gone_on_with(ended, tmp_path):
    config, folder = ended
    average_checkpoints(folder, tmp_path / "mean", last=2)
    with pytest.raises(train.RunError, match="--init-from"):
        prepare_run(config, tmp_path / "mean", lambda line: None)
    begun = dataclasses.replace(config, init_from=str(tmp_path / "mean"), steps=2)
    assert train.train(begun, tmp_path / "next", quiet=True).finished
    assert json.loads((tmp_path / "mean" / "config.json").read_text())["averaged_steps"] == [2, 3]


@pytest.mark.parametrize(
    ("last", "message"),
    [(4, r"3 checkpoints \(1, 2, 3\), .*4.*--keep-last 4"), (0, "last must .*0")],
)
def test_too_many_and_too_few(ended, tmp_path, last, message):
    with pytest.raises(train.RunError, match=message):
        average_checkpoints(ended[1], tmp_path / "mean", last=last)
    assert not (tmp_path / "mean").exists()


def test_nothing_is_overwritten(ended, tmp_path):
    (tmp_path / "mean").mkdir()
    with pytest.raises(train.RunError, match="mean exists"):
        average_checkpoints(ended[1], tmp_path / "mean", last=1)
