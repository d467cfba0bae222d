"""Every command and every Python block of the README and of `docs` runs, at a tiny size.

Each section of a page (below a heading `##`) is one test, in a folder of its own, so that
pytest-xdist can spread them.
"""

import contextlib
import dataclasses
import functools
import gzip
import importlib.util
import io
import itertools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from flaxzoo import data, models, train
from flaxzoo.data.chat.rows import read_rows
from flaxzoo.data.prepared.write_shards import in_order
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.heads.outputs import CausalLMOutput, Projection
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.train.cli import main as cli
from flaxzoo.train.cli.options import split_at_dashes
from flaxzoo.train.engine import compile as parallel
from flaxzoo.train.recipes import RECIPES

ROOT = Path(__file__).parents[2]
# Sphinx writes pages below some folders of `docs`, which have no commands to run.
GENERATED = ("families", "notebooks", "reference/api", "reference/commands", "reference/config")
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *(ROOT / room / "README.md" for room in ("models", "data", "train", "tests", "colab")),
    *(
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if not path.relative_to(ROOT / "docs").as_posix().startswith(GENERATED)
    ),
]

# Appended to each training command: the same run, only smaller.
SMALL = shlex.split(
    "--steps 4 --batch-size 8 --data.length 64 --model.max-length 64 --model.d-model 16 "
    "--model.num-layers 1 --model.num-heads 2 --optimizer.warmup-steps 1 --evaluate-every 4 "
    "--checkpoint-every 2 --sample-prompt None"
)
VOCABULARIES = {  # other recipes take over a vocabulary
    "quickstart": "300",
    "bert-quickstart": "60",
    "multi30k-en-de": "300",
    "t5-quickstart": "500",
}
MORE = {
    "embed": shlex.split("--objective.matryoshka-dims 16 8"),  # of a tiny model
    "multi30k-en-de": shlex.split("--steps 5 --checkpoint-every 1"),  # checkpoints to average
    "numbers-en-fr": ["--data.validation", "pairs:val.en.gz,val.de.gz"],  # 96 pairs, not 1,000
}

TYPED = {"rank": b"2 1\n1 2\n"}
"""The standard input of a command, if not a line of words."""

WORDS = "the train pulled into the station and a man was there when it came".split()


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
      page: path of the file, relative to the repository.
      title: the heading.
      text: the Markdown below the heading.
    """

    page: str
    title: str
    text: str

    def blocks(self, *languages):
        """Language and content of each code block in one of the languages, in order."""
        pattern = rf"```({'|'.join(languages)})\n(.*?)```"
        return re.findall(pattern, self.text, re.DOTALL)


def sections():
    found = []
    for path in PAGES:
        text = f"\n{path.read_text(encoding='utf-8')}"
        for part in re.split(r"\n#{1,2} (?=[^\n]+\n\n)", text)[1:]:
            title, _, body = part.partition("\n")
            found.append(Section(str(path.relative_to(ROOT)), title, body))
    return found


SECTIONS = sections()
# `test_serve_guides.py` runs these commands against a server.
SERVED = "docs/use/serve.md"
WITH_CODE = [s for s in SECTIONS if s.page != SERVED and s.blocks("sh", "python")]


def section(page, title):
    """The only section of a page with this title."""
    (found,) = (s for s in SECTIONS if (s.page, s.title) == (page, title))
    return found


def commands(block):
    """Each line of a shell block as (line, the arguments of flaxzoo or None)."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "flaxzoo" in words:
            yield line, words[words.index("flaxzoo") + 1 :]
        elif words and words[0] != "pip":
            yield line, None


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("files")
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    for name in ("README.md", "train.txt", "valid.txt"):
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text(text * 3, encoding="utf-8")
    write_data(folder)
    write_model(folder / "sentence-transformers" / "all-MiniLM-L6-v2", head="none")
    cross_encoder = {"head": "sequence_classification", "labels": ("score",)}
    write_model(folder / "cross-encoder" / "ms-marco-MiniLM-L6-v2", **cross_encoder)
    return folder


@pytest.fixture
def folder(files, tmp_path):
    """A copy of these files for one section."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """`opened(opening, run)`: trains the last run of the `train` commands that open a section.

    Many sections open with the same commands. The second one gets a copy of the run folders.
    """
    copies = {}

    def opened(opening, run):
        runs, kept = Path("runs"), copies.get(opening)
        if kept is not None:
            shutil.copytree(kept, runs, dirs_exist_ok=True)
            return
        run()
        # With --save-config, a command trains nothing.
        if runs.is_dir():
            copies[opening] = shutil.copytree(runs, tmp_path_factory.mktemp("opened") / "runs")

    return opened


def write_model(folder, **fields):
    """A tiny model in the Hugging Face format."""
    folder.mkdir(parents=True)
    pieces = [*WORDPIECE_SPECIALS, *sorted(set(WORDS))]
    wordpiece(pieces, lowercase=True).save(folder)
    sizes = {"max_length": 64, "num_layers": 1, "d_model": 16, "num_heads": 2}
    config = models.BertConfig(vocab_size=len(pieces), **fields, **sizes)
    params = models.init_params(models.create(config), jax.random.key(0))
    write_weights(folder, config, params)


def write_data(folder):
    """Text, labeled examples and sentence pairs, a few lines each."""
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
        "alpaca.train.jsonl.gz": "\n".join(
            json.dumps({"instruction": s, "input": "", "output": "there"}) for s in sentences
        ),
        "hh.train.jsonl.gz": "\n".join(
            json.dumps({"prompt": s, "chosen": " there", "rejected": " here"}) for s in sentences
        ),
        **{
            f"{split}.{side}.gz": "\n".join(sentences)
            for split in ("train", "val")
            for side in ("en", "de")
        },
        "reviews.csv": "text,label\n"
        + "\n".join(f"{s},{('bad', 'good')[i % 2]}" for i, s in enumerate(sentences)),
        "chats.jsonl": "\n".join(
            json.dumps({"prompt": s, "completion": s.split()[0]}) for s in sentences
        ),
        "pairs.jsonl": "\n".join(
            json.dumps({"question": s, "answer": " ".join(s.split()[::-1])}) for s in sentences
        ),
        "sts.csv": "sentence1,sentence2,score\n"
        + "\n".join(f"{s},{s[::-1]},{i / 96}" for i, s in enumerate(sentences)),
        "nli.jsonl": "\n".join(
            json.dumps({"premise": s, "hypothesis": s[:9], "label": i % 3})
            for i, s in enumerate(sentences)
        ),
        "answers.jsonl": "\n".join(
            json.dumps({"prompt": s, "answer": s.split()[0]}) for s in sentences[:3]
        ),
        "choices.jsonl": "\n".join(
            json.dumps({"context": s, "choices": ["there", "here"], "label": i % 2})
            for i, s in enumerate(sentences)
        ),
    }
    documents = {f"d{i}": sentence for i, sentence in enumerate(sentences)}
    queries = {f"q{i}": sentence[:20] for i, sentence in enumerate(sentences[:4])}
    relevant = {f"q{i}": {f"d{i}": 1} for i in range(4)}
    data.RetrievalData(documents, queries, relevant).save(folder / "scifact")
    for name, content in files.items():
        raw = (content + "\n").encode()
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)


def answer(sentence):
    return {"text": sentence.split()[1], "answer_start": len(sentence.split()[0]) + 1}


def tagged(sentence):
    return "\n".join(f"{word} N N {'I-PER' if word == 'man' else 'O'}" for word in sentence.split())


def without_beam(monkeypatch):
    """Prepares text in this process where Beam, which has its own tests, is not installed."""
    if importlib.util.find_spec("apache_beam") is None:
        monkeypatch.setattr(
            "flaxzoo.data.prepared.apache_beam.beam_workers", lambda options: in_order
        )


@contextlib.contextmanager
def devices_of(text):
    """Uses one of the eight devices, which compiles sooner, unless the text names a mesh."""
    with pytest.MonkeyPatch.context() as patch:
        if "mesh" not in text.lower():
            make_mesh = functools.partial(parallel.make_mesh, devices=jax.devices()[:1])
            patch.setattr(parallel, "make_mesh", make_mesh)
        yield


def smaller(arguments):
    """The same command with a tiny vocabulary, model, batch and number of steps."""
    if arguments[0] not in ("train", "launch"):
        # A vocabulary that the text fills; and a classifier of four steps is sure of nothing.
        smallest = {"2048": "300", "0.9": "0"}
        return [smallest.get(argument, argument) for argument in arguments]
    name = arguments[arguments.index("train") + 1]
    if name.startswith("runs/"):
        # The run is small, and has four steps.
        further = {"--extend-to": "6", "--batch-size": "16"}
        values = [further.get(option, "") for option in ("", *arguments)]
        return [new or old for new, old in zip(values, arguments, strict=False)]
    name = name.replace("run.toml", "quickstart")
    arguments = [*arguments, *SMALL, *MORE.get(name, [])]
    if "--data.row-length" in arguments:  # rows as long as the longest input of the tiny model
        arguments += ["--data.row-length", "64", "--data.length", "32"]
    # An existing tokenizer determines the size of the vocabulary.
    if "--data.tokenizer.path" not in arguments and (size := VOCABULARIES.get(name)):
        arguments += ["--data.tokenizer.vocab-size", size, "--model.vocab-size", size]
    return arguments


@pytest.mark.slow
@pytest.mark.parametrize("section", WITH_CODE, ids=lambda s: f"{s.page}: {s.title}")
def test_commands_and_python_blocks_run(section, folder, opened, monkeypatch, capsys):
    if section.title == "Develop":
        return  # the tests themselves
    monkeypatch.chdir(folder)
    without_beam(monkeypatch)
    jax.devices()  # this process keeps its eight devices; the processes it starts have one
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the train pulled\n")))

    def run(arguments):
        if typed := TYPED.get(arguments[0]):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed)))
        with devices_of(" ".join(arguments)):
            assert cli.main(arguments) == 0, (arguments, capsys.readouterr().err)

    names = {}  # a Python block uses the names of the blocks before it
    opening = ()  # None after anything but a `train` command
    for language, block in section.blocks("sh", "python"):
        if language == "python":
            with devices_of(block):
                exec(compile(block, section.page, "exec"), names)
            opening = None
            continue
        for line, arguments in commands(block):
            if arguments is None:
                subprocess.run(["bash", "-c", line], check=True)
                opening = None
                continue
            arguments = smaller(arguments)
            if opening is None or arguments[0] != "train":
                run(arguments)
                opening = None
                continue
            opening = (*opening, tuple(arguments))
            opened(opening, functools.partial(run, arguments))


NOT_RUN = [
    line.removeprefix("$ ")
    for one in SECTIONS
    for _, block in one.blocks("text")
    for line in block.replace("\\\n", " ").splitlines()
    if re.match(r"(\$ )?flaxzoo ", line)
]
"""Commands that need a compiler for TPUs or GPUs, a download, or minutes."""


@pytest.mark.parametrize("line", NOT_RUN)
def test_the_options_of_other_commands_exist(line, capsys):
    arguments, _ = split_at_dashes(shlex.split(line)[1:])
    assert cli.main([*arguments, "--nothing"]) == 2
    assert "unknown option --nothing" in capsys.readouterr().err


def test_the_records_of_the_pages_are_json():
    records = [block for one in SECTIONS for _, block in one.blocks("json")]
    assert records
    for line in "".join(records).splitlines():
        assert json.loads(line)


def test_the_file_of_settings_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ((_, text),) = section("docs/train/files.md", "Run from a file").blocks("toml")
    Path("run.toml").write_text(text, encoding="utf-8")
    read_options(["train", "run.toml"], capsys)


def test_the_file_of_instructions_is_read(folder, monkeypatch):
    monkeypatch.chdir(folder)
    ((_, text),) = section("docs/train/instruct.md", "Labeled data as instructions").blocks("toml")
    Path("tasks.toml").write_text(text, encoding="utf-8")
    assert sum(1 for _ in read_rows("instructions:tasks.toml")) == 96


def test_the_loss_of_a_language_model_counts_no_padding():
    ((_, block),) = section("docs/extend/loss.md", "A loss for a language model").blocks("python")
    names = {}
    exec(block[: block.index("\nsizes = ")], names)
    key, other = jax.random.split(jax.random.key(0))
    projection = Projection(jax.random.normal(key, (2, 3, 4)), jax.random.normal(other, (5, 4)))
    outputs = CausalLMOutput(projection.hidden, projection)
    batch = {
        "labels": np.array([[1, 4, 2], [3, 0, 0]]),
        "segment_ids": np.array([[1, 1, 2], [1, 0, 0]]),
    }
    objective, real = names["objective"], batch["segment_ids"] != 0
    sums, counts = objective.terms(outputs, batch), objective.counts(batch)
    usual = train.CAUSAL.terms(outputs, batch)["next_token"]
    np.testing.assert_allclose(sums["next_token"], usual, rtol=1e-5)
    log_z = np.log(np.exp(outputs.logits).sum(axis=-1))
    np.testing.assert_allclose(sums["z"], np.square(log_z[real]).sum(), rtol=1e-5)
    assert counts == {"next_token": 4, "z": 4}
    assert objective.coefficients.keys() == sums.keys() == counts.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_evaluation_with_mteb_runs(folder, monkeypatch):
    """With a task that needs no download."""
    mteb = pytest.importorskip("mteb")
    from mteb.mocks.mock_tasks import MockSTSTask

    ((_, block),) = section("docs/use/evaluate-vectors.md", "MTEB").blocks("text")
    monkeypatch.chdir(folder)
    Path("runs").mkdir()
    Path("runs/search").symlink_to(folder / "sentence-transformers" / "all-MiniLM-L6-v2")
    evaluate = functools.partial(mteb.evaluate, cache=None, co2_tracker=False)
    monkeypatch.setattr(mteb, "evaluate", evaluate)
    known = mteb.get_tasks
    monkeypatch.setattr(mteb, "get_tasks", lambda tasks: known(tasks=tasks) and [MockSTSTask()])
    names = {}
    exec(compile(block, "docs/use/evaluate-vectors.md", "exec"), names)
    (scores,) = names["results"].task_results[0].scores["test"]
    assert -1 <= scores["main_score"] <= 1


def test_the_pages_show_all_commands():
    shown = [
        arguments
        for section in WITH_CODE
        for _, block in section.blocks("sh")
        for _, arguments in commands(block)
        if arguments
    ]
    assert len(shown) >= 40
    apart = {"bench", "serve"}  # have their own tests
    assert {arguments[0] for arguments in shown} == cli.COMMANDS.keys() - apart


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_recipes_named_in_the_text_exist(path):
    for command, argument in re.findall(
        r"`(?:\$ )?flaxzoo ([a-z][a-z-]*)(?: ([a-z][\w-]*))?", path.read_text(encoding="utf-8")
    ):
        assert command in cli.COMMANDS
        if argument and command in ("train", "plan", "bench"):
            assert argument in RECIPES


def anchors(path):
    """The anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if target.is_relative_to(ROOT / "docs") and str(
            target.relative_to(ROOT / "docs")
        ).startswith(GENERATED):
            continue  # `sphinx-build -W` checks it
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_test_command_is_the_one_that_ci_runs():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install -e '.[test]' && pytest" in section("README.md", "Develop").text
    assert "/pip\" install -q --no-compile -e '.[test]'\n" in script
    assert 'pytest "$@"\n' in script


# The sbatch options in the script, and patterns of their values.
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
    ((_, script),) = section("docs/scale/machines.md", "On several machines").blocks("bash")
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
    ((_, text),) = section("docs/scale/machines.md", "On several machines").blocks("yaml")
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
    """Checks that `flaxzoo train` accepts all options and refuses the one added to them."""
    assert cli.main([*command, "--steps", "-1"]) == 2
    assert re.search("steps .*got -1", capsys.readouterr().err)
