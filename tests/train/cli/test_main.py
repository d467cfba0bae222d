"""The command `flaxzoo`, as a person types it."""

import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import time
import types

import pytest
from flaxzoo import data, models
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.registry import families
from flaxzoo.train.cli import main as cli
from flaxzoo.train.recipes import RECIPES
from flaxzoo.train.runs.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("on_one_device")

WORDS = "the cat sat on a mat and then it saw some dog run away from her big red house".split()
TINY = (
    "--data.validation None --data.validation-fraction 0.1 --data.length 16 "
    "--model.max-length 16 --model.num-layers 2 --model.d-model 16 --model.num-heads 2 "
    "--optimizer.warmup-steps 0 --batch-size 8 --steps 4 --log-every 1 --evaluate-every 4 "
    "--checkpoint-every 2 --sample-prompt the"
).split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    draw = random.Random(0)
    file.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=20)) for _ in range(60)))
    return file


def train(file, workdir, *options):
    """The arguments of a small training run."""
    source = f"text:{file}#block"
    return [
        *("train", "shakespeare-char", "--data.source", source, "--workdir", str(workdir)),
        *(*TINY, *options),
    ]


def python(*arguments):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A process that trained, and the run it left."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    return python("-m", "flaxzoo.train.cli.main", *train(text, folder)), folder


@pytest.fixture(scope="module")
def run(trained):
    return trained[1]


@pytest.fixture
def flaxzoo(capsys):
    """Runs a command in this process; its status, standard output and messages."""

    def flaxzoo(*arguments):
        capsys.readouterr()
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse's own, after the help
            status = error.code
        return status, *capsys.readouterr()

    return flaxzoo


def test_help_is_there_within_a_second():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = python("-m", "flaxzoo.train.cli.main", "--help")
        seconds.append(time.perf_counter() - start)
        assert (done.returncode, done.stderr) == (0, "")
        assert all(command in done.stdout for command in cli.COMMANDS)
    assert min(seconds) < 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("train --help", ["quickstart", "shakespeare-char", "--workdir"]),
        ("train quickstart --help", ["--optimizer.peak-learning-rate", "--workdir"]),
        ("train quickstart --help-all", ["--optimizer.beta1", "--workdir", "--no-resume"]),
        ("evaluate --help", ["--data", "--step"]),
        (
            "generate --help",
            ["--max-new-tokens", "--min-p", "--stop-strings", "--json"],
        ),
        ("list --help", []),
        ("tokenizer --help", ["flaxzoo tokenizer train SOURCE OUTPUT"]),
        ("tokenizer train --help", ["--kind", "--vocab-size"]),
        ("--help", ["flaxzoo train quickstart"]),
        ("--version", ["flaxzoo 0."]),
    ],
)
def test_every_command_explains_itself(flaxzoo, arguments, expected):
    status, out, messages = flaxzoo(*arguments.split())
    assert (status, messages) == (0, "")
    assert all(words in out for words in expected)


@pytest.mark.parametrize("columns", [40, 80])
def test_recipes_fit_the_terminal(flaxzoo, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = flaxzoo("train", "--help")
    lines = out.partition("\n\n")[2].splitlines()  # below the usage
    assert max(map(len, lines)) <= max(columns, 55)  # the longest title has 55 letters
    summary = lines.index(next(line for line in lines if line.startswith("  quickstart  ")))
    shown = " ".join(" ".join(lines[summary : summary + 7]).split())
    assert shown.startswith(f"quickstart {RECIPES['quickstart'].summary}")


@pytest.mark.slow
def test_train_prints_a_sample_and_where_to_go_on(trained):
    done, run = trained
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the")
    assert "--sample-prompt 'the'" in done.stderr
    assert re.search(r"compiled the step in \d+\.\d s", done.stderr)
    assert "unigram entropy" in done.stderr
    assert f"flaxzoo generate {run} --prompt" in done.stderr
    assert (run / "report.md").is_file()


def test_the_mesh_is_checked_before_data_are_read(flaxzoo, tmp_path):
    status, out, messages = flaxzoo(
        *("train", "quickstart", "--mesh.fsdp", 3, "--data.source", "text:/none.txt"),
        *("--workdir", tmp_path / "run"),
    )
    assert (status, out) == (2, "")
    assert "multiply" in messages
    assert messages.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_mesh_of_a_run_is_named_by_its_file(run, flaxzoo, tmp_path):
    fields = json.loads((run / "config.json").read_text())
    fields["train"]["mesh"]["fsdp"] = 3
    (tmp_path / "config.json").write_text(json.dumps(fields))
    status, _, messages = flaxzoo("train", tmp_path)
    assert status == 2
    assert "--mesh.fsdp 1 " in messages
    assert "--mesh.fsdp 3" not in messages
    assert str(tmp_path / "config.json") in messages


@pytest.mark.slow
def test_evaluate_prints_one_json_object(run, flaxzoo):
    status, out, _ = flaxzoo("evaluate", run)
    assert status == 0
    numbers = json.loads(out.splitlines()[-1])
    assert list(numbers) == ["loss", "perplexity", "bits_per_byte", "tokens"]
    assert numbers["perplexity"] == pytest.approx(math.exp(numbers["loss"]))
    logged = read_metrics(run, "validation")[-1]
    assert numbers == pytest.approx({name: logged[name] for name in numbers}, rel=1e-5)
    _, out, _ = flaxzoo("evaluate", run, "--step", 2)
    assert json.loads(out)["loss"] > numbers["loss"]


def test_evaluate_without_each_head(run, flaxzoo):
    """The table has a row for each layer, and the model depends on its heads."""
    status, out, _ = flaxzoo("evaluate", run, "--without-heads")
    assert status == 0
    title, numbers, *layers = out.splitlines()
    _, whole, _ = flaxzoo("evaluate", run)
    assert title.startswith(f"loss {json.loads(whole)['loss']:.4f}; without one head")
    assert numbers.split() == ["head_mask", "1", "2"]
    assert [line.split()[:2] for line in layers] == [["layer", "1"], ["layer", "2"]]
    assert any(float(x) != 0 for line in layers for x in line.split()[2:])
    status, _, message = flaxzoo("evaluate", run, "--without-heads", "--num-beams", 2)
    assert status == 2
    assert re.search("--num-beams .*--without-heads", message)


def test_evaluate_scores_an_unseen_file(run, tmp_path, flaxzoo):
    (tmp_path / "new.txt").write_text("a dog sat on the red mat ☺")
    status, out, messages = flaxzoo("evaluate", run, "--data", f"text:{tmp_path}/new.txt")
    assert status == 0
    numbers = json.loads(out)
    assert numbers["tokens"] == 27  # and the token that closes the document
    bits = numbers["loss"] * 27 / math.log(2)
    assert numbers["bits_per_byte"] == pytest.approx(bits / 28)
    assert "1 of 28 tokens" in messages


@pytest.mark.slow
def test_evaluate_in_a_process_of_its_own(run, flaxzoo):
    done = python("-m", "flaxzoo.train.cli.main", "evaluate", run)
    assert done.returncode == 0
    assert done.stderr == "data: 8 documents, 640 bytes, 648 tokens to predict\n"
    _, out, _ = flaxzoo("evaluate", run)
    theirs, ours = (json.loads(text.splitlines()[-1]) for text in (done.stdout, out))
    assert theirs == pytest.approx(ours, rel=1e-6)


@pytest.mark.slow
def test_generate_is_deterministic(run, flaxzoo):
    greedy = ("generate", run, "--prompt", "the ", "--max-new-tokens", 12, "--temperature", 0)
    status, out, messages = flaxzoo(*greedy, "--json")
    assert (status, messages) == (0, "")
    (sample,) = json.loads(out)["samples"]
    assert sample["prompt"] == "the "
    assert len(sample["tokens"]) == 12 or sample["finished"]
    assert flaxzoo(*greedy, "--json")[1] == out
    assert flaxzoo(*greedy)[1] == f"the {sample['text']}\n"  # streamed
    drawn = [flaxzoo("generate", run, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_generate_several(run, flaxzoo):
    several = ("generate", run, "--prompt", "the", "a dog", "--num-return-sequences", 2)
    status, out, _ = flaxzoo(*several, "--max-new-tokens", 5, "--stop-strings", "t", "x")
    assert status == 0
    texts = out.removesuffix("\n").split("\n----\n")
    assert [text[:3] for text in texts] == ["the", "the", "a d", "a d"]
    assert not any("t" in text[3:] or "x" in text for text in texts)
    _, out, _ = flaxzoo(*several, "--max-new-tokens", 5, "--stop-strings", "t", "x", "--json")
    assert [s["prompt"] + s["text"] for s in json.loads(out)["samples"]] == texts


def test_list_has_every_recipe_then_every_preset(flaxzoo):
    status, out, _ = flaxzoo("list")
    assert status == 0
    recipes, *presets = out.split("presets of ")
    listed = re.findall(r"^  (\S+)", recipes, re.MULTILINE)
    assert sorted(listed) == sorted(RECIPES)  # each in one group
    rows = [line.split() for line in "".join(presets).splitlines() if line]
    named = [row[0] for row in rows if row[0] in models.presets()]
    assert named == list(models.presets())  # a line each
    gpt3 = next(row for row in rows if row[0] == "gpt3-175b")
    assert gpt3[1:5] == ["174,604,259,328", "175B", "698", "2,048"]  # 698 GB: 4 bytes each
    gpt2 = next(row for row in rows if row[:2] == ["gpt2", "124,439,808"])
    assert gpt2[2:] == ["117M", "0.50", "1,024", "Radford", "et", "al.", "2019"]
    assert "flaxzoo train bert --preset NAME" in out
    groups = recipes.partition("\n\n")[2].rstrip()
    assert flaxzoo("train", "--help")[1].split("\n\n", 1)[1].startswith(groups)
    most = 2 * len(RECIPES) + len(models.presets()) + 5 * len(families())
    assert len(out.splitlines()) < most
    # The longest name of a preset has 26 letters.
    assert max(map(len, "".join(presets).splitlines())) <= 85


@pytest.mark.parametrize(
    ("statement", "slow"),
    [
        ("main(['--help'])", {"jax", "flax", "numpy", "optax"}),
        ("from flaxzoo import models", {"jax", "flax", "numpy", "optax"}),
        ("main(['generate', '--help'])", {"jax", "flax", "optax"}),
        ("main(['list'])", {"optax", "scipy", "huggingface_hub", "tokenizers", "safetensors"}),
        (
            "main(['train', 'quickstart', '--help'])",
            {"optax", "scipy", "huggingface_hub", "tokenizers", "safetensors", "sklearn"},
        ),
    ],
)
def test_start_up_imports_nothing_slow(statement, slow):
    program = f"""
import sys
from flaxzoo.train.cli.main import main
try:
    {statement}
except SystemExit:
    pass
print({{name.split('.')[0] for name in sys.modules}})
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.splitlines()[-1].strip("{}").replace("'", "").split(", "))
    assert "flaxzoo" in imported
    always_slow = {"orbax", "grain", "tensorflow_datasets", "tensorflow", "matplotlib"}
    assert not imported & (slow | always_slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("main(['train', 'quickstart', '--help'])", {"gpt"}),
        ("main(['train', 't5-quickstart', '--help'])", {"t5"}),
        ("main(['train', 'bert', '--preset', 'bert-large', '--help'])", {"bert"}),
        ("main(['train', 'llama', '--preset', 'llama3-8b', '--help'])", {"llama"}),
        ("models.create(models.preset('gpt2'))", {"gpt"}),
    ],
)
def test_start_up_imports_one_family(statement, expected):
    program = f"""
import sys
from flaxzoo import models
from flaxzoo.models.registry import FAMILIES
from flaxzoo.train.cli.main import main
try:
    {statement}
except SystemExit:
    pass
files = [f"flaxzoo.models.{{room}}.{{name}}" for name, room in FAMILIES.items()]
print(*(file.rpartition(".")[2] for file in files if file in sys.modules))
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[-1].split()) == expected


@pytest.mark.parametrize("kind", ["byte-bpe", "sentencepiece-unigram", "sentencepiece-bpe"])
def test_tokenizer_train(text, tmp_path, flaxzoo, kind):
    arguments = ("tokenizer", "train", f"text:{text}#block", tmp_path / "t", "--kind", kind)
    status, out, messages = flaxzoo(*arguments, "--vocab-size", 300)
    assert (status, out) == (0, "")
    assert messages.splitlines() == [f"{tmp_path}/t: {kind}, 300 tokens"]
    tokenizer = data.load_tokenizer(tmp_path / "t")
    assert tokenizer.decode(tokenizer.encode("the cat, É")) == "the cat, É"
    before = {file: file.read_bytes() for file in (tmp_path / "t").iterdir()}
    status, _, messages = flaxzoo(*arguments, "--vocab-size", 301)
    assert status == 2
    assert messages.startswith(f"flaxzoo: {tmp_path}/t exists")
    assert messages.count("\n") == 1
    assert {file: file.read_bytes() for file in (tmp_path / "t").iterdir()} == before


def test_tokenizer_train_characters(text, tmp_path, flaxzoo):
    output = tmp_path / "new" / "t"
    arguments = ("tokenizer", "train", f"text:{text}", output, "--kind", "characters")
    assert flaxzoo(*arguments)[0] == 0
    assert data.load_tokenizer(output).vocab_size == len(set(text.read_text())) + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "'trian': .* train"),
        ("train quickstar", "'quickstar': .*quickstart"),
        ("train quickstart --optimizer.peak-lerning-rate 1", "--optimizer.peak-learning-rate"),
        (
            "train quickstart --steps many",
            "--steps .*got 'many'",
        ),
        ("train quickstart --steps", "--steps .*no value"),
        (
            "train quickstart --data.length 999",
            "--data.length 999 .*--model.max-length 128",
        ),
        (
            "train quickstart --model.num-heads 7",
            "--model.d-model 192 .*--model.num-heads 7",
        ),
        ("evaluate", "evaluate .*RUN .*evaluate --help"),
        ("generate RUN --temprature 3", "--temprature: .*--temperature"),
        (
            "generate RUN --num-samples 4",
            "--num-samples: .*--num-return-sequences",
        ),
        (
            "translate RUN --input - --num-best 4",
            "--num-best: .*--num-return-sequences",
        ),
        ("chat RUN --stop x", "--stop: .*--stop-strings"),
        (
            "prompt RUN --query x --draft y",
            "--draft: .*--assistant-model",
        ),
        ("generate RUN more", "'more'.*generate --help"),
        ("export RUN out --form npy", "--form .*huggingface,"),
        ("generate runs/nowhere", "runs/nowhere does not exist"),
        ("train RUN --preset gpt2", "folder .*not a recipe"),
        ("train no.toml", "no.toml"),
        ("train runs/z", "recipe .*'runs/z'"),
        ("train quickstart --model.head sequence", "--model.head .*data"),
        ("train bert-classify --model.head span", "head sequence_classification .*leave it out"),
        (
            "train bert-classify --init-from runs/no --data.source tsv:none.tsv",
            "runs/no does not exist",  # before the data are read
        ),
        (
            "tokenizer train builtin:python-docs out --vocab-size 5",
            "--vocab-size .*257",
        ),
        ("generate RUN --prompt", "prompts must not be empty"),
        ("generate RUN --step 3", "step 3: .* 2, 4"),
        ("evaluate RUN --data txt:nowhere", "'txt:nowhere'"),
        (
            "generate RUN --temperature -1",
            "--temperature .* 0",
        ),
        ("generate RUN --stop-strings ''", "stop string .*empty"),
        ("tokenizer trian a b", "tokenizer .*action: train"),
    ],
)
def test_mistakes_are_named(flaxzoo, run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    arguments = [str(run) if word == "RUN" else word for word in shlex.split(arguments)]
    status, out, messages = flaxzoo(*arguments)
    assert (status, out) == (2, "")
    assert re.search(message, messages)
    assert "Traceback" not in messages
    assert messages.startswith("flaxzoo: ")
    assert messages.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "file: '{file}'"),
        (b"", "'text:{file}#block'"),
        (b" \n\n \n", "'text:{file}#block'"),
        ("one é".encode() + b"\xff two", "{file} line 1 .* 0xff .*byte 7;"),
        (b"one\n\ntwo\n\nthree", "one sequence .*16"),
        (b"word " * 50, "1 different text"),
    ],
)
def test_bad_text_ends_before_a_run_begins(flaxzoo, tmp_path, content, message):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    status, out, messages = flaxzoo(*train(file, tmp_path / "run"))
    assert (status, out) == (2, "")
    last = messages.splitlines()[-1]
    assert last.startswith("flaxzoo: ")
    assert re.search(message.format(file=re.escape(str(file))), last)
    assert messages.count("flaxzoo: ") == 1
    assert "Traceback" not in messages
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_is_too_large(flaxzoo, text, tmp_path):
    arguments = ["train", "quickstart", "--data.source", f"text:{text}#block"]
    status, _, messages = flaxzoo(*arguments, "--workdir", tmp_path / "run")
    assert status == 2
    assert "too small" in messages
    assert messages.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_published_data_set_without_a_network(flaxzoo, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.setattr("flaxzoo.data.sources.tfds.documents._is_reachable", lambda url: False)
    for name, message in (
        ("ag_news_subset#description", "cannot be downloaded"),
        ("ag_news_subst", " ag_news_subset"),
    ):
        arguments = ["train", "shakespeare-char", "--data.source", f"tfds:{name}"]
        status, _, messages = flaxzoo(*arguments, "--workdir", tmp_path / "run", *TINY)
        assert status == 2
        assert messages.startswith("flaxzoo: ")
        assert message in messages
        assert messages.count("\n") == 1
        assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be(flaxzoo, text, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, messages = flaxzoo(*train(text, tmp_path / "file" / "run"))
    assert status == 2
    assert messages.splitlines()[-1].startswith("flaxzoo: ")
    assert "Traceback" not in messages


def test_another_configuration_is_refused(flaxzoo, run, text):
    status, _, messages = flaxzoo(*train(text, run, "--seed", 3))
    assert status == 2
    assert "(seed 0 → 3)" in messages
    assert "--init-from" not in messages
    options = ["--seed", 3, "--batch-size", 4, "--steps", 9, "--model.dropout-rate", 0.3]
    status, _, messages = flaxzoo(*train(text, run, *options))
    assert status == 2
    assert re.search(r"\(([^→]+→ \S+){3} and 1 more\)", messages)
    status, _, messages = flaxzoo(*train(text, run, "--steps", 8))
    assert status == 2
    assert "(steps 4 → 8)" in messages
    assert f"flaxzoo train {run} --extend-to STEPS)" in messages
    status, _, messages = flaxzoo(*train(text, run, "--no-resume"))
    assert status == 2
    assert re.search("step 4: .*--no-resume", messages)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_has_its_own_status(flaxzoo, text, tmp_path):
    options = ("--optimizer.peak-learning-rate", "1e38", "--skip-bad-steps", "0")
    status, out, messages = flaxzoo(*train(text, tmp_path / "run", *options))
    assert (status, out) == (3, "")
    last = messages.splitlines()[-1]
    assert last.startswith("flaxzoo: ")
    assert "--optimizer.peak-learning-rate" in last
    assert "Traceback" not in messages


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "gpu", "abacus"])
def test_devices_that_are_not_here(tmp_path, platform):
    done = subprocess.run(
        [sys.executable, "-m", "flaxzoo", "bench", "quickstart"],
        env={**os.environ, "JAX_PLATFORMS": platform},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"flaxzoo: JAX_PLATFORMS '{platform}' ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        ("--xla_force_host_platform_device_count=8", None, "32"),
        ("--xla_force_host_platform_device_count=8", "3", "3"),
        ("", None, None),
    ],
)
def test_virtual_devices_have_threads(monkeypatch, flaxzoo, flags, given, expected):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("NPROC")
    if given is not None:
        monkeypatch.setenv("NPROC", given)
    assert flaxzoo("list")[0] == 0
    assert os.environ.get("NPROC") == expected


@pytest.mark.parametrize(
    ("body", "is_bug"), [("one, two = arguments", True), ("raise UserError('choose two')", False)]
)
def test_a_bug_keeps_its_traceback(monkeypatch, capsys, body, is_bug):
    """Only a UserError is told in one line; a ValueError of Python's own is a bug."""
    module = types.ModuleType("flaxzoo.train.cli.broken")
    vars(module)["UserError"] = UserError
    exec(f"def broken_command(arguments): {body}", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "broken", ("broken", ""))
    if is_bug:
        with pytest.raises(ValueError, match="unpack"):
            cli.main(["broken", "alone"])
    else:
        assert cli.main(["broken", "alone"]) == 2
        assert capsys.readouterr().err == "flaxzoo: choose two\n"


def shell(command, **environment):
    """Runs `flaxzoo` in a shell."""
    called = command.replace("flaxzoo", f"'{sys.executable}' -W error -m flaxzoo", 1)
    return subprocess.run(
        ["bash", "-c", called],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status", "printed"),
    [
        ("flaxzoo list <&- >&-", 0, ""),
        ("flaxzoo list 2>&- | tail -c 1", 0, "\n"),
        ("flaxzoo list | head -c 7", 0, "recipes"),
        ("flaxzoo generate --help | head -c 5", 0, "usage"),
        ("flaxzoo nothing <&- >&-", 2, "nothing"),
        ("flaxzoo list > /dev/full", 2, "No space left"),
        ("flaxzoo generate $'a\\xff' --prompt b", 2, "a\\udcff"),
        ("flaxzoo generate runs/none --prompt b --seed 1$(printf '%040d')", 2, "--seed"),
        ("flaxzoo generate runs/none --prompt b --temperature nan", 2, "--temperature"),
        ("flaxzoo generate runs/none --prompt b --seed -1", 2, "--seed"),
        ("flaxzoo train gpt --optimizer.peak-learning-rate inf", 2, "peak-learning-rate"),
    ],
)
def test_closed_and_full_streams_and_odd_arguments(command, status, printed):
    done = shell(f"set -o pipefail; {command}" if "|" not in command else command)
    shown = (done.stdout + done.stderr).decode()
    assert done.returncode == status, shown
    assert printed in shown
    assert "Traceback" not in shown
    assert "Exception ignored" not in shown


def test_an_output_without_letters_is_escaped_as_json(flaxzoo):
    done = shell(r"""flaxzoo "$(printf '{\303\251}')" """, PYTHONIOENCODING="ascii")
    assert done.stderr.startswith(rb"flaxzoo: no command named '{\u00e9}'")


def test_links_in_a_circle_are_no_bug(flaxzoo, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    status, _, shown = flaxzoo("generate", tmp_path / "loop" / "run", "--prompt", "a")
    assert status == 2
    assert "loop" in shown


@pytest.mark.parametrize(("recipe", "begin"), [("dpo", "sft"), ("sft", "quickstart")])
def test_a_beginning_that_the_recipe_names_is_no_misspelling(
    flaxzoo, tmp_path, monkeypatch, recipe, begin
):
    (tmp_path / "runs" / "sfx").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    status, _, shown = flaxzoo("train", recipe)
    assert status == 2
    assert f"run runs/{begin}" in shown
    assert f"flaxzoo train {begin}" in shown
    assert "did you mean" not in shown
    status, _, shown = flaxzoo("train", recipe, "--init-from", "runs/sft")
    assert status == 2
    assert "the recipe" not in shown


def test_a_package_that_is_not_installed_is_missed_before_data_are_read(
    flaxzoo, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    arguments = train(tmp_path / "none.txt", tmp_path / "run", "--wandb-project", "mine")
    status, _, shown = flaxzoo(*arguments)
    assert status == 2
    assert "wandb" in shown
    assert "none.txt" not in shown


def test_the_help_of_chat_data_says_what_they_are(flaxzoo):
    for recipe in ("sft", "dpo", "reward", "grpo"):
        shown = " ".join(flaxzoo("train", recipe, "--help")[1].split())
        assert "messages" in shown.partition("--data.source")[2].partition("--data.validation")[0]
        beta = shown.partition("--objective.beta")[2]
        assert "by default" not in beta.partition("(default")[0]
