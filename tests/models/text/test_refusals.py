"""Parameters, outputs and tokenizers that would give wrong answers without a word."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.common.json_text import to_json
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.nn.typing import Params
from flaxzoo.train.cli.main import main
from flaxzoo.train.runs.metrics_log import MetricsLog, read_metrics

pytestmark = pytest.mark.usefixtures("on_one_device")

PIECES = [*WORDPIECE_SPECIALS, *"the cat sat good bad".split()]
SIZES = {"vocab_size": 16, "max_length": 32, "num_layers": 1, "d_model": 8, "num_heads": 2}
BERT = models.BertConfig(**SIZES, d_ff=16, head="none")
CLASSIFIER = dataclasses.replace(BERT, head="sequence_classification", labels=("bad", "good"))
MASKED = dataclasses.replace(BERT, head="masked_lm")
GPT = models.GPTConfig(**SIZES)
COMMANDS = {
    "embed": (BERT, "embed MODEL --input TEXTS --output OUT.npy"),
    "predict": (CLASSIFIER, "predict MODEL --input TEXTS"),
    "evaluate": (CLASSIFIER, "evaluate MODEL --data tsv:LABELED"),
    "fill-mask": (MASKED, "fill-mask MODEL the[MASK]sat --json"),
    "attend": (BERT, "attend MODEL cat --json"),
    "score": (GPT, "score MODEL --text cat.sat --json"),
    "next": (GPT, "next MODEL cat --json"),
    "generate": (GPT, "generate MODEL --prompt cat --json"),
    "search": (GPT, "generate MODEL --prompt cat --num-beams 2 --json"),
    "export": (BERT, "export MODEL OUT"),
    "import": (BERT, "import MODEL OUT"),
}
LARGE = {
    "embed": "embedding_norm/scale",
    "predict": "embedding_norm/scale",
    "evaluate": "embedding_norm/scale",
    "fill-mask": "head/transform_norm/scale",
    "score": "final_norm/scale",
    "next": "final_norm/scale",
    "generate": "final_norm/scale",
    "search": "final_norm/scale",
}
"""A parameter of each command's model whose size makes the outputs infinite, though it is not."""


def write(folder, config, pieces=PIECES, **changes):
    """Writes a folder in Hugging Face's form; changed parameters have the value given."""
    folder.mkdir()
    params: Params = flatten_dict(
        models.init_params(models.create(config), jax.random.key(0)), sep="/"
    )
    for name, value in changes.items():
        params[name] = np.full_like(params[name], value)
    write_weights(folder, config, unflatten_dict(params, sep="/"))
    wordpiece(pieces, lowercase=True).save(folder)
    return params


def run(tmp_path, capsys, command):
    """Returns the status of a command, its output and its lines on standard error."""
    (tmp_path / "texts.txt").write_text("the cat\n")
    (tmp_path / "labeled.tsv").write_text("good\tthe cat\nbad\tsat\n")
    places = {"MODEL": "model", "TEXTS": "texts.txt", "LABELED": "labeled.tsv", "OUT": "out"}
    for name, work_folder in places.items():
        command = command.replace(name, str(tmp_path / work_folder))
    status = main(command.split())
    printed = capsys.readouterr()
    return status, printed.out, printed.err.splitlines()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_parameter_that_is_not_finite_is_named(tmp_path, capsys, name, value):
    config, command = COMMANDS[name]
    params = write(tmp_path / "model", config)
    spoiled = next(path for path in params if path.endswith("query/kernel"))
    (tmp_path / "model").rename(tmp_path / "whole")
    write(tmp_path / "model", config, **{spoiled: value})
    status, out, lines = run(tmp_path, capsys, command)
    assert (status, out) == (2, "")
    assert f"in 1 of {len(params)} parameters, first in {spoiled}" in (lines[-1])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


@pytest.mark.parametrize("name", LARGE)
def test_an_output_that_is_not_finite_is_refused(tmp_path, capsys, name):
    config, command = COMMANDS[name]
    write(tmp_path / "model", config, **{LARGE[name]: 3e38})
    status, out, lines = run(tmp_path, capsys, command)
    assert (status, out) == (2, "")
    assert lines[-1].startswith("flaxzoo: ")
    assert "NaN or infin" in lines[-1] or "scores are NaN" in lines[-1]
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path, capsys, name):
    config, command = COMMANDS[name]
    write(tmp_path / "model", config, [*PIECES, *"abcdefgh"])
    status, out, lines = run(tmp_path, capsys, command)
    assert (status, out) == (2, "")
    [line] = lines[-1:]
    assert "18 tokens, more than the 16 " in line


def test_a_run_folder_is_refused_as_well(tmp_path, capsys):
    write(tmp_path / "theirs", GPT)
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "model")]) == 0
    wordpiece([*PIECES, *"abcdefgh"], lowercase=True).save(tmp_path / "model" / "tokenizer")
    for command in ("generate MODEL", f"train quickstart --init-from MODEL --workdir {tmp_path}/w"):
        status, _, lines = run(tmp_path, capsys, command)
        assert status == 2
        assert "18 tokens, more than the 16 " in lines[-1]


def test_a_tokenizer_that_pads_with_another_token_is_another_models(tmp_path, capsys):
    write(tmp_path / "model", CLASSIFIER)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": 1}))
    status, _, [line] = run(tmp_path, capsys, COMMANDS["predict"][1])
    assert status == 2
    assert "10 tokens and pads with 0, the model has 16 and pads with 1" in line


@pytest.mark.slow
def test_padded_embeddings_are_fine_and_many_rows_without_a_token_are_mentioned(tmp_path, capsys):
    large = dataclasses.replace(CLASSIFIER, vocab_size=len(PIECES) + 1025)
    write(tmp_path / "model", large)
    status, _, lines = run(tmp_path, capsys, COMMANDS["predict"][1])
    assert status == 0
    assert f"{tmp_path / 'model'} has 10 tokens, and its model has 1,035 rows" in lines[0]
    (tmp_path / "model").rename(tmp_path / "large")
    write(tmp_path / "model", dataclasses.replace(large, vocab_size=large.vocab_size - 1))
    status, _, lines = run(tmp_path, capsys, COMMANDS["predict"][1])
    assert status == 0
    assert not [line for line in lines if "note" in line]


def test_a_prompt_beyond_the_context_is_mentioned(tmp_path, capsys):
    write(tmp_path / "model", GPT)
    prompt = "cat " * 40
    command = ["generate", str(tmp_path / "model"), "--max-new-tokens", "1", "--json", "--prompt"]
    assert main([*command, prompt, "cat"]) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["samples"]) == 2
    [line] = printed.err.splitlines()
    assert re.search("1 of 2 prompts .*32 tokens .*41.* 24 ", line)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "0"], "1 of 1 texts exceed the 32 tokens"),
        (["--num-beams", "2"], "1 of 1 texts end at the 32 tokens"),
    ],
)
def test_truncated_prompts_are_mentioned(options, message, tmp_path, capsys):
    write(tmp_path / "model", GPT)
    command = ["generate", str(tmp_path / "model"), "--prompt", "cat " * 27, *options]
    assert main([*command, "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*command, "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.slow
def test_json_has_neither_nan_nor_infinity(tmp_path):
    with pytest.raises(UserError, match=r"JSON .*NaN"):
        to_json({"x": [1.0, float("nan")]})
    with MetricsLog(tmp_path, first_step=0, wandb_project=None) as log:
        log.write(1, "train", {"loss": float("inf"), "x": 1.0})
    assert '"loss": null' in (tmp_path / "metrics.jsonl").read_text()
    assert read_metrics(tmp_path, "train") == [{"step": 1, "split": "train", "loss": None, "x": 1}]
