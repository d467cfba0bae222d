"""The pages on the server: commands run against a real one, and files are checked."""

import contextlib
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys

import jax
import lm_eval.tasks
import pytest
import yaml
from flaxzoo import models, train
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer
from flaxzoo.train.cli.inference.serve import ServeArguments
from flaxzoo.train.cli.options import parse
from lm_eval.__main__ import cli_evaluate

from ..support.server import closing_sessions, running
from .test_readme import SECTIONS, SERVED, WORDS, commands, section, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("on_one_device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DEPLOY = "docs/scale/deploy.md"
HARNESS = "Evaluate with lm-evaluation-harness"
ADDRESS = "http://localhost:8000"
# Compile little before the first request.
QUICK = "--warm-up-length", "0", "--rows", "1"
TEXTS = [" ".join(WORDS), "Hello! The for statement."] * 9
SIZES = {"max_length": 64, "num_layers": 1, "d_model": 16, "num_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with tiny models that have the names of the page."""
    folder = tmp_path_factory.mktemp("served")
    write_model(folder / "sentence-transformers" / "all-MiniLM-L6-v2", head="none")
    score = {"head": "sequence_classification", "labels": ("score",)}
    write_model(folder / "cross-encoder" / "ms-marco-MiniLM-L6-v2", **score)
    words = train_tokenizer(TEXTS, TokenizerConfig("wordpiece", 60))
    pieces = train_tokenizer(TEXTS, TokenizerConfig("byte-bpe", 270))
    labels = {"head": "sequence_classification", "labels": ("bad", "good")}
    for name, kind, tokenizer, fields in (
        ("quickstart", models.GPTConfig, pieces, {}),
        ("reviews", models.BertConfig, words, labels),
        ("translate", models.EncoderDecoderConfig, pieces, {}),
    ):
        model = models.create(kind(vocab_size=tokenizer.vocab_size, **SIZES, **fields))
        params = models.init_params(model, jax.random.key(0))
        train.save_run(folder / "runs" / name, model, params, tokenizer)
    return folder


@pytest.fixture(scope="module")
def url(folder):
    """A server of all models."""
    _, several, *_ = served_commands()
    with contextlib.chdir(folder), running(folder, *several, *QUICK) as server:
        yield server.url


def served_commands():
    """The arguments of each `flaxzoo serve` on the page."""
    blocks = (block for one in SECTIONS if one.page == SERVED for _, block in one.blocks("sh"))
    found = [arguments for block in blocks for _, arguments in commands(block) if arguments]
    assert all(name == "serve" for name, *_ in found)
    return [arguments for _, *arguments in found]


def test_the_options_of_the_page_exist():
    for arguments in served_commands():
        assert parse(ServeArguments, arguments, "flaxzoo serve").models


@pytest.mark.parametrize(
    "section",
    [x for x in SECTIONS if x.page == SERVED and ADDRESS in x.text and x.title != HARNESS],
    ids=lambda x: x.title,
)
def test_requests_of_the_page_are_answered(section, url):
    names = {}  # a Python block uses the names of the blocks before it
    for language, block in section.blocks("sh", "python"):
        block = block.replace(ADDRESS, url)
        if language == "python":
            exec(compile(block, section.page, "exec"), names)
            continue
        for line, arguments in commands(block):
            if arguments is None:
                subprocess.run(["bash", "-c", line], check=True, stdout=subprocess.DEVNULL)


def test_the_harness_evaluates_a_server(folder, tmp_path, monkeypatch):
    """Its command runs with a task whose data is a file."""
    ((_, block),) = section(SERVED, HARNESS).blocks("sh")
    (_, arguments), (line, _) = commands(block)
    assert arguments is not None
    with contextlib.chdir(folder), running(tmp_path, *arguments[1:], *QUICK) as server:
        run_harness(line.replace(ADDRESS, server.url), tmp_path, monkeypatch)


def run_harness(line, folder, monkeypatch):
    rows = [{"text": "The for", "target": f" {word}"} for word in WORDS[:3]]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{target}}",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "own.yaml").write_text(json.dumps(task))
    own = line.replace("lambada_openai", str(folder / "own.yaml"))
    assert own != line
    monkeypatch.setattr(sys, "argv", [*shlex.split(own), "--output_path", str(folder / "found")])
    # The index of all other tasks takes seconds.
    manager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)
    with closing_sessions(monkeypatch):
        cli_evaluate()
    (results,) = (folder / "found").rglob("results*.json")
    assert json.loads(results.read_text())["results"]["own"]["acc,none"] in (0, 1 / 3, 2 / 3, 1)


def file_of(title, language):
    ((_, text),) = section(DEPLOY, title).blocks(language)
    return text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_valid(tmp_path):
    text = file_of("systemd", "ini")
    (command,) = re.findall(r"ExecStart=\S+/flaxzoo serve (.*)", text)
    assert parse(ServeArguments, command.split(), "flaxzoo serve").host == "0.0.0.0"
    file = tmp_path / "flaxzoo.service"
    file.write_text(text.replace("/opt/flaxzoo/bin/flaxzoo", sys.executable))
    subprocess.run(["systemd-analyze", "verify", file], check=True)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_the_dockerfile_has_no_faults(tmp_path):
    (tmp_path / "Dockerfile").write_text(file_of("Docker", "dockerfile"))
    subprocess.run(["hadolint", tmp_path / "Dockerfile"], check=True)


def test_the_manifest_parses():
    deployment, service = yaml.safe_load_all(file_of("Kubernetes", "yaml"))
    pod = deployment["spec"]["template"]
    assert pod["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"]
    assert pod["metadata"]["labels"] == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    assert parse(ServeArguments, container["args"], "flaxzoo serve").models
    (port,) = container["ports"]
    assert port["containerPort"] == ServeArguments(models=("a",)).port
    for name in ("startupProbe", "readinessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": port["name"]}
    # SIGTERM comes after preStop, and the server ends within 10 seconds of it.
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= waits + 10
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
