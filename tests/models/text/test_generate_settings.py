"""Continuations as a causal model's folder asks for them, against transformers' own."""

import json
import re

import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer
from flaxzoo.models.hf.tensors.mapping import WeightsError
from flaxzoo.models.text.folder import generation_defaults
from flaxzoo.train.cli.main import main
from flaxzoo.train.convert.export import export_model
from flaxzoo.train.convert.import_hf import import_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

V, END = 300, 0
PROMPTS = ("the cat", "on the mat sat")
ASKED = {
    "greedy": {"do_sample": False, "num_beams": 1, "max_new_tokens": 9},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.4, "max_length": 20},
    "a forced end": {"num_beams": 2, "forced_eos_token_id": END, "max_new_tokens": 7},
    "unwanted words": {"num_beams": 2, "suppress_tokens": [7, 9], "max_new_tokens": 8},
}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=64, n_embd=24, n_layer=2, n_head=2, initializer_range=0.5,
        bos_token_id=END, eos_token_id=END,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture
def folder(theirs, tmp_path):
    """The model's folder, with whatever it is to ask for."""

    def make(settings):
        work_folder = tmp_path / "theirs"
        theirs.save_pretrained(work_folder)
        train_tokenizer(["the cat sat on the mat " * 9], TokenizerConfig("byte-bpe", 265)).save(
            work_folder
        )
        ids = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
        (work_folder / "generation_config.json").write_text(json.dumps(ids | settings))
        return work_folder

    return make


def written(capsys, work_folder, *options):
    """What the command answers for all prompts: the tokens of each continuation."""
    capsys.readouterr()
    assert main(["generate", str(work_folder), "--prompt", *PROMPTS, "--json", *options]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    return [sample["tokens"] for sample in samples], [sample["finished"] for sample in samples]


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.filterwarnings("ignore")  # of transformers, about its own flags
def test_as_transformers_from_every_form(theirs, folder, tmp_path, capsys, name):
    work_folder = folder(ASKED[name])
    tokenizer = transformers.AutoTokenizer.from_pretrained(work_folder)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.convert_ids_to_tokens(END)
    given = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    stored = transformers.GenerationConfig.from_pretrained(work_folder)
    output = theirs.generate(**given, generation_config=stored)
    length = given["input_ids"].shape[1]
    rows = [row[length:].tolist() for row in output]
    ended = [END in row for row in rows]
    expected = [row[: row.index(END)] if END in row else row for row in rows]
    import_model(work_folder, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "back")
    for form in (work_folder, tmp_path / "run", tmp_path / "back"):
        assert written(capsys, form) == (expected, ended)
        settings = models.generation_arguments(form)
        ids = given["input_ids"].numpy()
        model, params = models.load(form)
        mask = given["attention_mask"].numpy()
        ours = models.generate(model, params, ids, attention_mask=mask, **settings)
        np.testing.assert_array_equal(ours, output.numpy())


@pytest.mark.slow
def test_words_that_are_not_to_be_drawn(folder, capsys):
    work_folder = folder({"do_sample": True, "top_k": 0, "suppress_tokens": list(range(1, V - 2))})
    tokens, _ = written(capsys, work_folder)
    assert {token for row in tokens for token in row} == {V - 2, V - 1}
    assert all(len(row) <= 200 for row in tokens)


def test_each_of_several_ends_ends_a_continuation(folder, capsys):
    work_folder = folder({"eos_token_id": list(range(V)), "num_beams": 1})
    assert written(capsys, work_folder) == ([[], []], [True, True])


@pytest.mark.slow
def test_options_overrule_the_folder(folder, capsys):
    work_folder = folder({"num_beams": 3, "max_length": 30, "repetition_penalty": 1.0})
    options = ("--temperature", "0", "--max-new-tokens", "6")
    greedy, _ = written(capsys, work_folder, *options)
    assert greedy == written(capsys, work_folder, "--num-beams", "1", *options)[0]
    assert all(len(row) <= 6 for row in greedy)
    several, _ = written(
        capsys, work_folder, "--num-return-sequences", "3", "--max-new-tokens", "6"
    )
    assert len(several) == 6
    drawn, _ = written(
        capsys, work_folder, "--top-k", "5", "--num-return-sequences", "2", "--seed", "1"
    )
    assert len(drawn) == 4
    work_folder = folder(
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_length": 30}
    )
    assert (
        written(capsys, work_folder, "--top-k", "5", "--num-return-sequences", "2", "--seed", "1")[
            0
        ]
        == drawn
    )
    assert written(capsys, work_folder, "--num-beams", "1", "--max-new-tokens", "6")[0] == greedy
    assert greedy == written(capsys, folder({"do_sample": False}), *options)[0]
    work_folder = folder({"repetition_penalty": 1.5})
    assert (
        len(written(capsys, work_folder, "--num-beams", "2", "--repetition-penalty", "1")[0]) == 2
    )


def test_length_penalty_without_beams_of_the_folder_either(folder, capsys):
    work_folder = folder({})
    assert main(["generate", str(work_folder), "--length-penalty", "0.5"]) == 2
    assert "--length-penalty 0.5 " in capsys.readouterr().err
    assert len(written(capsys, folder({"num_beams": 2}), "--length-penalty", "0.5")[0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"eos_token_id": 5000}, {"eos_token_id": None}])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_an_end_that_cannot_be_written_ends_nothing(folder, theirs, tmp_path, settings, num_beams):
    work_folder = folder(
        settings | {"num_beams": num_beams, "max_new_tokens": 6, "do_sample": False}
    )
    import_model(work_folder, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "back")
    ids = np.array([[5, 6, 7], [8, 9, 10]])
    stored = transformers.GenerationConfig.from_pretrained(work_folder)
    expected = theirs.generate(
        torch.from_numpy(ids), attention_mask=torch.ones(2, 3), generation_config=stored
    )
    for form in (work_folder, tmp_path / "run", tmp_path / "back"):
        ours = models.generate(*models.load(form), ids, **models.generation_arguments(form))
        np.testing.assert_array_equal(ours, expected.numpy())
    prompts = [train.open_run(work_folder)[1].decode(row.tolist()) for row in ids]
    samples = models.TextGenerator.of_run(work_folder)
    assert all(len(sample.tokens) == 6 for sample in samples(prompts))


def test_fewer_answers_than_asked_for_are_an_error(folder, capsys):
    words = list(range(2, V))
    settings = {"num_beams": 4, "num_return_sequences": 4, "suppress_tokens": words}
    work_folder = folder(settings | {"max_new_tokens": 1})
    assert main(["generate", str(work_folder), "--prompt", "a"]) == 2
    assert "2 of --num-return-sequences 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", "-1"), "--temperature .*got -1 "),
        (("--temperature", "nan"), "temperature.*nan"),
        (("--num-beams", "0"), "--num-beams .*got 0"),
        (("--num-beams", "2", "--do-sample"), "generate: --do-sample "),
        (("--num-beams", "2", "--top-k", "3"), "--top-k 3 .*--num-beams 2"),
        (("--num-beams", "2", "--num-return-sequences", "3"), "--num-return-sequences 3 "),
        (
            ("--num-beams", "2", "--repetition-penalty", "2"),
            "--repetition-penalty 2.0 .*--num-beams 2",
        ),
        (("--num-beams", "1", "--length-penalty", "2"), "--length-penalty 2.0 "),
        (
            ("--temperature", "0", "--num-return-sequences", "2"),
            "--num-return-sequences 2 .*--num-beams 1",
        ),
        (("--temperature", "0", "--top-p", "7"), "--top-p .*got 7 "),
        (("--max-new-tokens", "0"), "--max-new-tokens .*got 0"),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_read(capsys, options, message):
    assert main(["generate", "nowhere", *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size 3"),
        ({"num_beams": 2, "do_sample": True}, "do.sample"),
        ({"mirostat": 1}, "mirostat"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, tmp_path, capsys, settings, message):
    work_folder = folder(settings)
    for arguments in (
        ["import", str(work_folder), str(tmp_path / "run")],
        ["generate", str(work_folder)],
    ):
        assert main(arguments) == 2
        assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_trained_here_asks_for_nothing(folder, tmp_path):
    import_model(folder({}), tmp_path / "run")
    fields = json.loads((tmp_path / "run" / "config.json").read_text())
    assert fields.pop("generation")["eos_token_id"] == END
    (tmp_path / "run" / "config.json").write_text(json.dumps(fields))
    assert generation_defaults(tmp_path / "run") is None
    with pytest.raises(WeightsError, match=r"run .*generation settings"):
        models.generation_arguments(tmp_path / "run")
