"""Every command and every Python block of the README is run, at a tiny size."""

import contextlib
import functools
import gzip
import importlib.util
import itertools
import json
import os
import random
import re
import shlex
import subprocess
from pathlib import Path

import jax
import pytest
import yaml
from flaxzoo import models
from flaxzoo.data.prepared.write_shards import in_order
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.train.cli import main as cli
from flaxzoo.train.engine import compile as parallel

README = Path(__file__).parents[2] / "README.md"

# Appended to each training command: the same run, only smaller.
SMALL = shlex.split(
    "--steps 4 --batch-size 8 --data.length 64 --model.max-length 64 --model.d-model 16 "
    "--model.num-layers 1 --model.num-heads 2 --optimizer.warmup-steps 1 --evaluate-every 2 "
    "--checkpoint-every 2 --sample-prompt None"
)
VOCABULARIES = {  # others have one already
    "quickstart": "300",
    "bert-quickstart": "60",
    "multi30k-en-de": "300",
}
MORE = {
    "multi30k-en-de": shlex.split("--steps 5 --checkpoint-every 1"),  # to be averaged
    "numbers-en-fr": ["--data.validation", "pairs:val.en.gz,val.de.gz"],  # 96 pairs, not 1,000
}

WORDS = "the train pulled into the station and a man was there when it came".split()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def commands():
    """The arguments of each `flaxzoo …` in a shell block, in order."""
    found = []
    for block in blocks("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "flaxzoo" in words:
                found.append(words[words.index("flaxzoo") + 1 :])
    return found


def cutting():
    """The line that cuts a novel into chapters."""
    return next(line for block in blocks("sh") for line in block.splitlines() if "csplit" in line)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files that the README speaks of."""
    folder = tmp_path_factory.mktemp("readme")
    text = README.read_text(encoding="utf-8")
    for name in ("README.md", "train.txt", "valid.txt"):
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text(text * 3, encoding="utf-8")
    write_data(folder)
    write_model(folder / "all-MiniLM-L6-v2")
    return folder


def write_model(folder):
    """A tiny model in Hugging Face's form."""
    folder.mkdir()
    pieces = [*WORDPIECE_SPECIALS, *sorted(set(WORDS))]
    wordpiece(pieces, lowercase=True).save(folder)
    sizes = {"max_length": 64, "num_layers": 1, "d_model": 16, "num_heads": 2}
    config = models.BertConfig(vocab_size=len(pieces), head="none", **sizes)
    params = models.init_params(models.create(config), jax.random.key(0))
    write_weights(folder, config, params)


def write_data(folder):
    """The files of BERT's section, a few lines each."""
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(WORDS, k=8)) for _ in range(96)]
    documents = ["\n".join(sentences[i : i + 8]) for i in range(0, 96, 8)]
    chapters = [f"CHAPTER {i}\n\n{document}." for i, document in enumerate(documents)]
    questions = [
        {"context": s, "qas": [{"id": s, "question": "who", "answers": [answer(s)]}]}
        for s in sorted(set(sentences))
    ]
    articles = [{"title": q["context"], "paragraphs": [q]} for q in questions]
    files = {
        "brown.train.txt.gz": "\n\n".join(documents),
        "brown.valid.txt.gz": "\n\n".join(documents[:4]),
        "war_and_peace.txt.gz": "\n\n".join(chapters),
        "sentences.txt": "\n".join(sentences[:3]),
        "sst2.train.tsv.gz": "\n".join(f"{i % 2}\t{s}" for i, s in enumerate(sentences)),
        "sst2.dev.tsv.gz": "\n".join(f"{i % 2}\t{s}" for i, s in enumerate(sentences[:9])),
        "eng.train.gz": "\n\n".join(map(tagged, sentences)),
        "eng.testa.gz": "\n\n".join(map(tagged, sentences[:9])),
        "squad.json.gz": json.dumps({"version": "1.1", "data": articles}),
        "questions.jsonl": json.dumps({"context": sentences[0], "question": "who"}),
        "english.txt": "\n".join(sentences[:3]),
        **{
            f"{split}.{side}.gz": "\n".join(sentences)
            for split in ("train", "val")
            for side in ("en", "de")
        },
        "choices.jsonl": "\n".join(
            json.dumps({"context": s, "choices": ["there", "here"], "label": i % 2})
            for i, s in enumerate(sentences)
        ),
    }
    for name, content in files.items():
        raw = (content + "\n").encode()
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)


def answer(sentence):
    return {"text": sentence.split()[1], "answer_start": len(sentence.split()[0]) + 1}


def tagged(sentence):
    return "\n".join(f"{word} N N {'I-PER' if word == 'man' else 'O'}" for word in sentence.split())


def without_beam(monkeypatch):
    """Has this process prepare text where Beam is not installed, which has its own tests."""
    if importlib.util.find_spec("apache_beam") is None:
        monkeypatch.setattr(
            "flaxzoo.data.prepared.apache_beam.beam_workers", lambda options: in_order
        )


@contextlib.contextmanager
def devices_of(arguments):
    """One of this process's eight devices, unless a command asks for more: it compiles sooner."""
    with pytest.MonkeyPatch.context() as patch:
        if not any(argument.startswith("--mesh.") for argument in arguments):
            make_mesh = functools.partial(parallel.make_mesh, devices=jax.devices()[:1])
            patch.setattr(parallel, "make_mesh", make_mesh)
        yield


@pytest.mark.slow
def test_every_command_and_python_block_runs(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    without_beam(monkeypatch)
    jax.devices()  # this process has its eight; of processes that are started:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    monkeypatch.setenv("XLA_FLAGS", flags)
    subprocess.run(["bash", "-c", cutting()], check=True)
    ran = commands()
    assert len(ran) >= 20
    for arguments in ran:
        if arguments[0] in ("train", "launch"):
            name = arguments[arguments.index("train") + 1]
            arguments = [*arguments, *SMALL, *MORE.get(name, [])]
            if size := VOCABULARIES.get(name):
                arguments += ["--data.tokenizer.vocab-size", size, "--model.vocab-size", size]
        with devices_of(arguments):
            assert cli.main(arguments) == 0, (arguments, capsys.readouterr().err)
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert (place / "runs" / "quickstart" / "report.md").is_file()


def test_the_test_command_is_the_one_that_ci_runs():
    script = (README.parent / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install -e '.[test]' && pytest" in README.read_text(encoding="utf-8")
    assert "/pip\" install -q -e '.[test]'\n" in script
    assert 'pytest "$@"\n' in script


# What sbatch knows of a script's head, as far as the README uses it, and what its values look like.
SBATCH = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "time": r"\d+:\d\d:\d\d",
    "signal": r"[A-Z]+@\d+",
    "requeue": None,
}


def test_the_slurm_script_parses(capsys):
    (script,) = blocks("bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    first, *rest = script.splitlines()
    assert first == "#!/bin/bash"
    head = list(itertools.takewhile(lambda line: line.startswith("#SBATCH"), rest))
    for line in head:
        name, equals, value = line.removeprefix("#SBATCH --").partition("=")
        pattern = SBATCH[name]
        assert re.fullmatch(pattern, value) if pattern else not equals, line
    # One task for each GPU, which is what jax gives a task.
    found = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in head)
    assert found["ntasks-per-node"] == found["gpus-per-node"]
    (command,) = rest[len(head) :]
    assert shlex.split(command)[:3] == ["srun", "flaxzoo", "train"]
    read_options(shlex.split(command)[2:], capsys)


def test_the_jobset_parses(capsys):
    (text,) = blocks("yaml")
    jobset = yaml.safe_load(text)
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert jobset["kind"] == "JobSet"
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    job = replicated["template"]["spec"]
    assert job["parallelism"] == job["completions"]
    assert job["completionMode"] == "Indexed"
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    assert environment["JAX_NUM_PROCESSES"]["value"] == str(job["completions"])
    # A JobSet names its pods JOBSET-JOB-REPLICA-INDEX, below its own name.
    name = jobset["metadata"]["name"]
    host, port = environment["JAX_COORDINATOR_ADDRESS"]["value"].split(":")
    assert host == f"{name}-{replicated['name']}-0-0.{name}"
    assert port.isdecimal()
    path = environment["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert container["command"][:2] == ["flaxzoo", "train"]
    read_options(container["command"][1:], capsys)


def read_options(command, capsys):
    """Has `flaxzoo train` read all options, and refuse what comes after them."""
    with pytest.raises(SystemExit):
        cli.main([*command, "--steps", "-1"])
    assert "steps -1 must be at least 0" in capsys.readouterr().err
