"""Models by their name on the hub: from its cache without a network, else an error at once."""

import os
import shutil
import subprocess
import sys
import time

import jax
import pytest
from flaxzoo import models
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.hub import local_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROGRAM = """
import sys
from flaxzoo import models
try:
    print(models.load(sys.argv[1])[0].config.d_model)
except FileNotFoundError as error:
    print(error)
"""


def loaded(name, home, **environment):
    """What another process says of a model that it loads by name."""
    environment = {**os.environ, "HF_HOME": str(home), **environment}
    command = [sys.executable, "-c", PROGRAM, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def home(tmp_path):
    """The hub's folder on this machine, with a model that was fetched earlier."""
    cached = tmp_path / "hub" / "models--owner--tiny"
    folder = cached / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    config = models.GPTConfig(vocab_size=16, max_length=8, num_layers=1, d_model=8, num_heads=2)
    write_weights(folder, config, models.init_params(models.create(config), jax.random.key(0)))
    return tmp_path


@pytest.mark.slow
def test_what_was_fetched_needs_no_network(home):
    assert loaded("owner/tiny", home, HF_HUB_OFFLINE="1") == "8"


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_without_a_network_the_error_comes_at_once(home, environment):
    shutil.rmtree(home / "hub")
    begin = time.perf_counter()
    message = loaded("owner/tiny", home, **environment)
    assert "owner/tiny" in message
    assert "hub cannot be reached" in message
    assert "\n" not in message
    assert time.perf_counter() - begin < 60  # most of it is importing jax


def test_a_path_in_a_folder_that_exists_is_never_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="runs/one"):
        local_folder("runs/one")
    (tmp_path / "mine" / "first").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"mine/frist .*mine/first"):
        local_folder("mine/frist")


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./owner/tiny", "a/b/c", "../tiny", "~/x"])
def test_a_path_is_never_looked_for_on_the_hub(path):
    assert not local_folder(path).exists()


@pytest.mark.slow
def test_what_exists_is_never_looked_for_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder("owner/tiny").is_dir()
