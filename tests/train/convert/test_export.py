"""Runs of every kind, exported: what transformers makes of them, and what comes back."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict
from flaxzoo import data, models, train
from flaxzoo.models.heads.specs import HEADS
from flaxzoo.models.hf.equivalent_params import as_marian
from flaxzoo.models.init import parameter_shapes
from flaxzoo.train.cli.main import main
from flaxzoo.train.config import to_dict
from flaxzoo.train.convert.export import export_model
from flaxzoo.train.convert.import_hf import import_model
from flaxzoo.train.runs.params_only_run import make_params_only_run
from safetensors.numpy import load_file

from ...support.encoders import WORDS

pytestmark = pytest.mark.usefixtures("on_one_device")
TEXTS = ["the cat sat on a mat", "it  saw\tsome Dog!\n", " <|endoftext|> ünïcode 漢字", ""]


def arrays(params):
    return {path: np.asarray(x) for path, x in flatten_dict(params, sep="/").items()}


def same(ours, theirs):
    ours, theirs = arrays(ours), arrays(theirs)
    return ours.keys() == theirs.keys() and all(
        np.array_equal(x, theirs[path]) for path, x in ours.items()
    )


def written_out(config):
    """A configuration in which nothing follows from something else."""
    sizes = {} if config.head == "causal_lm" else {"d_ff": config.feed_forward_dim}
    if config.head == "seq2seq_lm":
        decoder = config.decoder
        sizes |= {
            "num_decoder_layers": decoder.num_layers,
            "decoder_num_heads": decoder.num_heads,
            "decoder_d_ff": decoder.feed_forward_dim,
        }
    return dataclasses.replace(config, **sizes)


def torch_model(folder, head):
    """The model that transformers reads of a folder; nothing is missing, nothing left over."""
    cls = getattr(transformers, HEADS[head].hf_auto_class)
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def agree(ours, theirs):
    """Logits of both, to 1e-5 of their size."""
    names = [n for n in theirs if n.endswith("logits")]
    assert names
    for name in names:
        x, y = np.asarray(getattr(ours, name)), theirs[name].detach().numpy()
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1.0, np.abs(y).max()))


def torch_inputs(given):
    return {name: torch.tensor(np.asarray(x), dtype=torch.long) for name, x in given.items()}


def rows_of_ids(vocab_size, head, rows=3, length=9):
    shape = (rows, 2, length) if head == "multiple_choice" else (rows, length)
    ids = np.random.default_rng(0).integers(5, vocab_size, shape, dtype=np.int32)
    mask = np.ones(shape, np.int32)
    mask[-1, ..., length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


# Encoders.


@pytest.fixture(params=["pretrained", "masked", "one", "several", "score", "tag", "span", "choice"])
def encoder(request, work_folder):
    """The run folder of an encoder, for each of the heads that are trained."""
    if request.param in ("pretrained", "masked"):
        return request.getfixturevalue(request.param)
    request.getfixturevalue("tuned")(request.param)
    return work_folder / request.param


@pytest.mark.slow
def test_an_encoder_and_its_tokenizer(encoder, tmp_path):
    export_model(encoder, tmp_path / "out")
    model, params = models.load(encoder)
    given = rows_of_ids(model.config.vocab_size, model.config.head)
    given["token_type_ids"] = np.indices(given["input_ids"].shape)[-1] // 5
    theirs = torch_model(tmp_path / "out", model.config.head)
    agree(jax.jit(model.apply)({"params": params}, **given), theirs(**torch_inputs(given)))
    ours = data.load_tokenizer(encoder / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == ours.encode(text)
    padded = tokenizer(TEXTS[:2], padding=True, return_tensors="pt")
    assert padded["attention_mask"].sum(1).tolist() == [len(ours.encode(x)) for x in TEXTS[:2]]


@pytest.mark.slow
def test_an_exported_model_is_imported_bit_for_bit(encoder, tmp_path):
    export_model(encoder, tmp_path / "out")
    import_model(tmp_path / "out", tmp_path / "back")
    (model, params), (again, back) = models.load(encoder), models.load(tmp_path / "back")
    assert again.config == written_out(model.config)
    assert same(params, back)
    (before, _), (after, _) = train.open_run(encoder), train.open_run(tmp_path / "back")
    assert getattr(after.data, "target", None) == getattr(before.data, "target", None)
    assert after.data.kind == before.data.kind


@pytest.mark.parametrize(("kind", "problem_type"), [("one", None), ("score", "regression")])
def test_labels_are_what_they_were(tuned, work_folder, tmp_path, kind, problem_type):
    tuned(kind)
    export_model(work_folder / kind, tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["problem_type"] == (problem_type or "single_label_classification")


# Causal language models.


TOKENIZERS = {
    "byte-bpe": 290,  # as the others, to share their programs
    "sentencepiece-unigram": 290,
    "sentencepiece-bpe": 290,
    "characters": None,
}


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def gpt(request, tmp_path_factory):
    """The run folder of a GPT with each kind of tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "text.txt").write_text("\n".join(" ".join(WORDS[i:] + WORDS[:i]) for i in range(19)))
    config = train.TrainConfig(
        model=models.GPTConfig(vocab_size=1, max_length=32, num_layers=2, d_model=16, num_heads=2),
        data=data.CausalLMData(
            source=f"text:{folder}/text.txt#line",
            length=16,
            validation_fraction=0.3,
            tokenizer=data.TokenizerConfig(
                kind=request.param, vocab_size=TOKENIZERS[request.param]
            ),
        ),
        optimizer=train.OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=1),
        steps=4,
        batch_size=4,
    )
    train.train(config, folder / "run", quiet=True)
    return folder / "run"


@pytest.mark.slow
def test_a_gpt_and_its_tokenizer(gpt, tmp_path):
    notes = export_model(gpt, tmp_path / "out")
    assert notes
    model, params = models.load(gpt)
    theirs = torch_model(tmp_path / "out", "causal_lm")
    given = rows_of_ids(model.config.vocab_size, "causal_lm")
    given["attention_mask"][:] = 1  # of padding transformers counts the positions otherwise
    agree(jax.jit(model.apply)({"params": params}, **given), theirs(**torch_inputs(given)))
    ours = data.load_tokenizer(gpt / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        ids = ours.encode(text)
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == ours.decode(ids)


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_gpt_writes_the_same(gpt, tmp_path, num_beams):
    export_model(gpt, tmp_path / "out")
    model, params = models.load(gpt)
    theirs = torch_model(tmp_path / "out", "causal_lm")
    options = {"max_new_tokens": 12, "num_beams": num_beams}
    ids = rows_of_ids(model.config.vocab_size, "causal_lm")["input_ids"]
    stored_settings = models.generation_arguments(tmp_path / "out")
    written = theirs.generate(torch.tensor(ids, dtype=torch.long), **options)
    np.testing.assert_array_equal(
        models.generate(model, params, ids, **{**stored_settings, **options}), written.numpy()
    )


def test_a_gpt_comes_back_and_goes_on(gpt, tmp_path, capsys):
    export_model(gpt, tmp_path / "out")
    import_model(tmp_path / "out", tmp_path / "back")
    (model, params), (again, back) = models.load(gpt), models.load(tmp_path / "back")
    assert again.config == written_out(model.config)
    assert same(params, back)
    printed = []
    for folder in (gpt, tmp_path / "out", tmp_path / "back"):
        arguments = ["--prompt", "the cat", "--temperature", "0", "--max-new-tokens", "8"]
        assert main(["generate", str(folder), *arguments]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]


# Translation.


@pytest.fixture(scope="module", params=["interleaved-post", "halves-post", "interleaved-pre"])
def translation(request, tmp_path_factory):
    """A run folder with the parameters that training would begin with, some of them far from 0."""
    folder = tmp_path_factory.mktemp("translation")
    layout, norms = request.param.split("-")
    model = models.create(
        models.EncoderDecoderConfig(
            vocab_size=296, max_length=24, num_layers=2, d_model=16, num_heads=2, d_ff=24,
            position_layout=layout, norm_position=norms,
        )
    )  # fmt: skip
    draw = np.random.default_rng(0)
    shapes = parameter_shapes(model)
    params = jax.tree.map(lambda x: draw.normal(0.5, 0.5, x.shape).astype(np.float32), shapes)
    texts = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(19)]
    tokenizer = data.train_tokenizer(texts, data.TokenizerConfig("sentencepiece-bpe", 290))
    _make_run(folder / "run", "multi30k-en-de", model.config, params, tokenizer)
    return folder / "run"


@pytest.mark.slow
def test_a_translation_model(translation, tmp_path):
    notes = export_model(translation, tmp_path / "out")
    assert any("(5 + n) / 6" in note for note in notes)
    model, params = models.load(translation)
    theirs = torch_model(tmp_path / "out", "seq2seq_lm")
    given = rows_of_ids(290, "seq2seq_lm")
    given["decoder_input_ids"] = given["input_ids"][:, ::-1].copy()
    agree(jax.jit(model.apply)({"params": params}, **given), theirs(**torch_inputs(given)))
    for num_beams in (1, 4):
        options = {"num_beams": num_beams, "max_new_tokens": 9}
        stored_settings = models.generation_arguments(tmp_path / "out")
        inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
        written = theirs.generate(**torch_inputs(inputs), **options)
        ours = models.generate(model, params, **inputs, **{**stored_settings, **options})
        np.testing.assert_array_equal(ours, written.numpy())


def test_its_tokenizer_closes_sources(translation, tmp_path):
    export_model(translation, tmp_path / "out")
    ours = data.load_tokenizer(translation / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == [*ours.encode(text), ours.special_ids.eos]


def test_a_translation_model_comes_back(translation, tmp_path):
    export_model(translation, tmp_path / "out")
    import_model(tmp_path / "out", tmp_path / "back")
    model, params = models.load(translation)
    again, back = models.load(tmp_path / "back")
    config, expected = as_marian(model.config, params)
    assert again.config == written_out(config)
    assert same(expected, back)
    export_model(tmp_path / "back", tmp_path / "again")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.slow
def test_it_translates_from_either_folder(translation, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("the cat\n\na dog ran\n")
    export_model(translation, tmp_path / "out")
    import_model(tmp_path / "out", tmp_path / "back")
    printed = []
    for folder in (translation, tmp_path / "out", tmp_path / "back"):
        arguments = ["--input", str(tmp_path / "in.txt"), "--num-beams", "1"]
        assert main(["translate", str(folder), *arguments]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    assert printed[0].count("\n") == 3


def test_what_marian_cannot_say_is_refused(translation, tmp_path, capsys):
    fields = json.loads((translation / "config.json").read_text())
    fields["model"]["norm_eps"] = 1e-6
    run = tmp_path / "run"
    run.mkdir()
    for name in ("tokenizer", "checkpoints"):
        (run / name).symlink_to(translation / name)
    (run / "config.json").write_text(json.dumps(fields))
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "norm_eps 1e-06: only 1e-05" in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# Forms.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_of_a_size_and_precision(pretrained, tmp_path, dtype):
    arguments = ["--file-gb", "0.000004", "--dtype", dtype]
    assert main(["export", str(pretrained), str(tmp_path / "out"), *arguments]) == 0
    files = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    theirs = torch_model(tmp_path / "out", "pretraining")
    assert theirs.dtype == getattr(torch, dtype)
    _, params = models.load(tmp_path / "out")
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), models.load(pretrained)[1])
    assert same(rounded, params)


def test_the_card_states_training_data_and_scores(tuned, work_folder, tmp_path):
    result = tuned("one")
    export_model(work_folder / "one", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-classification\n")
    assert "| source | tsv:texts.tsv |" in card  # without the folders of this machine
    assert "| optimizer.peak_learning_rate | 0.01 |" in card
    assert f"| accuracy | {result.validation['accuracy']:.6g} |" in card


def test_plain_arrays(pretrained, tmp_path):
    _, params = models.load(pretrained)
    assert main(["export", str(pretrained), f"{tmp_path}/a.npz", "--form", "npz"]) == 0
    export_model(pretrained, tmp_path / "a.safetensors", form="safetensors", dtype="bfloat16")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as stored:
        assert same(params, dict(stored))
    stored = load_file(tmp_path / "a.safetensors")
    assert same(jax.tree.map(lambda x: x.astype("bfloat16"), params), stored)
    with pytest.raises(train.RunError, match="float32, not float16"):
        export_model(pretrained, tmp_path / "b", form="stablehlo", dtype="float16")
    with pytest.raises(train.RunError, match=r"npz .*bfloat16"):
        export_model(pretrained, tmp_path / "b.npz", form="npz", dtype="bfloat16")


PROGRAM = """
import sys
import jax, numpy as np
from safetensors.numpy import load_file
folder = sys.argv[1]
program = jax.export.deserialize(open(f"{folder}/forward.stablehlo", "rb").read())
inputs = dict(np.load(f"{folder}/inputs.npz"))
outputs = program.call(load_file(f"{folder}/params.safetensors"), **inputs)
np.savez(f"{folder}/outputs.npz", **outputs)
assert not any(name.startswith("flaxzoo") for name in sys.modules)
"""


def test_a_program_without_our_code(pretrained, tmp_path):
    assert main(["export", str(pretrained), str(tmp_path / "out"), "--form", "stablehlo"]) == 0
    model, params = models.load(pretrained)
    given = rows_of_ids(model.config.vocab_size, model.config.head)
    given["token_type_ids"] = given["attention_mask"]
    np.savez(tmp_path / "out" / "inputs.npz", **given)
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "out")], check=True)
    output = model.apply({"params": params}, **given)
    with np.load(tmp_path / "out" / "outputs.npz") as file:
        answers = dict(file)
    assert {"prediction_logits", "seq_relationship_logits"} <= set(answers)
    for name in answers:
        np.testing.assert_allclose(answers[name], getattr(output, name), atol=1e-5, rtol=1e-5)


def _make_run(folder, recipe, model, params, tokenizer):
    """A run folder that was not trained."""
    config = train.recipe(recipe)
    rows = dataclasses.replace(config.data, length=model.max_length)
    fields = to_dict(dataclasses.replace(config, model=model, data=rows))
    facts = {"model": fields.pop("model"), "train": fields}
    make_params_only_run(folder, facts, save_tokenizer=tokenizer.save, step=0, params=params)


def test_a_place_that_is_taken_is_refused(pretrained, tmp_path, capsys):
    assert main(["export", str(pretrained), str(tmp_path)]) == 2
    assert "exists: give" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
