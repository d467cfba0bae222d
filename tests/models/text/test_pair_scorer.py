"""Scores of pairs are those of the class CrossEncoder, in both directions."""

import json
import warnings

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flaxzoo import data, models
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.models.finite import load_finite
from flaxzoo.models.hf.cross_encoder import PairScoring, read_pair_scoring, write_pair_scoring
from flaxzoo.models.hf.tensors.mapping import WeightsError
from flaxzoo.models.text.yes_no_scorer import answers_yes_or_no, open_pair_scorer
from flaxzoo.train.cli.main import main
from flaxzoo.train.serve.rows.opening import row_functions
from flaxzoo.train.serve.rows.rerank import tokens_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sentence_transformers import CrossEncoder

PIECES = [*WORDPIECE_SPECIALS, *"the old man went down to sea who ?".split()]
DOCUMENTS = ["the old man went down to the sea", "who ?", "sea " * 40, "", "the sea"]
PAIRS = [("who went to sea ?", document) for document in DOCUMENTS]
IDENTITY = "torch.nn.modules.linear.Identity"


def saved(folder, labels=1, **fields):
    """A random BERT that classifies, as transformers writes it, and further fields."""
    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    layers = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
    config = transformers.BertConfig(**sizes, **layers, vocab_size=len(PIECES))
    config.update({"num_labels": labels, "max_position_embeddings": 32, "initializer_range": 0.2})
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    wordpiece(PIECES, lowercase=True).save(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def theirs(folder):
    return CrossEncoder(str(folder), device="cpu").predict(PAIRS)


def silent(line):
    del line


def of_version_6(folder):
    model = CrossEncoder(str(saved(folder / "plain")), device="cpu", max_length=20)
    model.activation_fn = torch.nn.Tanh()
    model.save_pretrained(str(folder / "six"))
    return folder / "six"


FOLDERS = {
    "plain": saved,
    "three labels": lambda folder: saved(folder, 3),
    "version 6": of_version_6,
    "version 5": lambda f: saved(f, sentence_transformers={"activation_fn": IDENTITY}),
    "version 3": lambda f: saved(f, sbert_ce_default_activation_function=IDENTITY),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FOLDERS)
def test_scores_are_those_of_the_package(tmp_path, form, assert_close):
    folder, lines = FOLDERS[form](tmp_path), []
    scorer, expected = models.PairScorer.of_run(folder), theirs(folder)
    assert_close(scorer.score(PAIRS, lines.append), expected)
    if form == "version 6":
        with pytest.raises(UserError, match=r"cross-encoder, .*PairScorer"):
            models.TextEmbedder.of_run(folder)
    longest = 20 if form == "version 6" else 32
    assert lines == [f"1 of 5 pairs truncated: longer than {longest} tokens"]
    if form == "three labels":
        with pytest.raises(UserError, match="3 labels"):
            scorer.rank("who", DOCUMENTS)
        return
    ranked = scorer.rank(PAIRS[0][0], DOCUMENTS, top_k=3, log=silent)
    best = CrossEncoder(str(folder), device="cpu").rank(PAIRS[0][0], DOCUMENTS, top_k=3)
    assert [row.index for row in ranked] == [row["corpus_id"] for row in best]
    assert_close([row.score for row in ranked], np.array([row["score"] for row in best]))


@pytest.mark.slow
def test_an_imported_and_exported_folder_has_the_same_scores(tmp_path, capsys, assert_close):
    folder = of_version_6(tmp_path)
    expected = theirs(folder)
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert_close(theirs(tmp_path / "out"), expected)
    # Versions 4 and 5 read config.json alone.
    (tmp_path / "out" / "modules.json").unlink()
    (tmp_path / "out" / "config_sentence_transformers.json").unlink()
    assert_close(theirs(tmp_path / "out")[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: sentence-transformers\npipeline_tag: text-ranking\n" in card
    # The command.
    rows = [{"query": query, "document": document} for query, document in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    for model in (folder, tmp_path / "run"):
        assert main(["predict", str(model), "--input", str(tmp_path / "pairs.jsonl")]) == 0
        found = [json.loads(line)["score"] for line in capsys.readouterr().out.splitlines()]
        assert_close(np.array(found), expected)


def changed(folder, file, **fields):
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: changed(f, "sentence_bert_config.json", module_output_name="x"),
         "module_output_name 'x'"),
        (lambda f: changed(f, "config_sentence_transformers.json", activation_fn="my.Sigmoid"),
         "activation_fn my.Sigmoid .*Identity"),
        (lambda f: changed(f, "config_sentence_transformers.json", activation_fn=None),
         "no activation_fn"),
        (lambda f: changed(f, "config_sentence_transformers.json", default_prompt_name="x"),
         "default_prompt_name 'x'"),
        (lambda f: (f / "modules.json").write_text(json.dumps([
            {"type": f"sentence_transformers.{name}", "path": ""}
            for name in ("Transformer", "LogitScore")])),
         "LogitScore .*classifier"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, message):
    settings = PairScoring(activation="Tanh", max_length=7, lowercase=True)
    write_pair_scoring(tmp_path, settings, max_length=9)
    assert read_pair_scoring(tmp_path) == settings
    change(tmp_path)
    with pytest.raises(WeightsError, match=message):
        read_pair_scoring(tmp_path)


def test_wrong_pairs_and_models_are_refused(tmp_path):
    scorer = models.PairScorer.of_run(saved(tmp_path))
    for pairs, message in (
        ([("a", "b", "c")], r"pairs\[0\] .*tuple"),
        ([], "pairs .*empty"),
    ):
        with pytest.raises(UserError, match=message):
            scorer.score(pairs)
    with pytest.raises(UserError, match=r"activation .*'Sigmoit'"):
        PairScoring(activation="Sigmoit")


LIMIT = 260
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def language_model(folder, tied):
    """A random Qwen3 and its tokenizer, as transformers writes them."""
    backend = tokenizers.ByteLevelBPETokenizer()
    words = ["yes yes no no the document is the query?\n", *DOCUMENTS] * 3
    options = {"vocab_size": 330, "min_frequency": 1, "show_progress": False}
    backend.train_from_iterator(words, special_tokens=[*SPECIAL], **options)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer, padding_side="left", pad_token=SPECIAL[0]
    )
    tokenizer.add_special_tokens({"extra_special_tokens": [*SPECIAL[1:]]})
    tokenizer.save_pretrained(folder)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    heads = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), **sizes, **heads, head_dim=8, tie_word_embeddings=tied
    )
    config.update({"max_position_embeddings": LIMIT, "initializer_range": 0.3})
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_scores_by_yes_and_no(tied, tmp_path):
    """As the example of Qwen3-Reranker: pairs are truncated, and the prompt is not."""
    model, tokenizer = language_model(tmp_path, tied)
    usual = models.YesNoScorer.of_run(tmp_path)
    for prompt in (models.YesNoPrompt(), models.YesNoPrompt(instruction="Find the sea?")):
        scorer, lines = usual.with_prompt(prompt), []
        before, after, no, yes = (
            tokenizer(text, add_special_tokens=False).input_ids
            for text in (prompt.before, prompt.after, "no", "yes")
        )
        expected = []
        for pair in PAIRS:
            ids = tokenizer(prompt.join(*pair), add_special_tokens=False).input_ids
            ids = [*before, *ids[: LIMIT - len(before) - len(after)], *after]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1, [*no, *yes]]
            expected.append(torch.softmax(logits, -1)[1].item())
        np.testing.assert_allclose(scorer.score(PAIRS, lines.append), expected, atol=1e-5)
        assert len(lines) == (prompt == models.YesNoPrompt())  # where a pair is truncated
        assert np.ptp(expected) > 0.02
        best = scorer.rank(PAIRS[0][0], DOCUMENTS, log=silent)
        assert best[0].index == int(np.argmax(expected))


def test_the_command_line_scores_by_yes_and_no(tmp_path, capsys):
    language_model(tmp_path / "model", True)
    rows = [{"query": a, "document": b} for a, b in PAIRS[:3]]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["predict", str(tmp_path / "model"), "--input", str(tmp_path / "x.jsonl")]
    assert main([*given, "--yes-no", "--instruction", "Find the sea?"]) == 0
    found = [json.loads(line)["score"] for line in capsys.readouterr().out.splitlines()]
    scorer = open_pair_scorer(tmp_path / "model")
    scorer = scorer.with_prompt(models.YesNoPrompt(instruction="Find the sea?"))
    np.testing.assert_allclose(found, scorer.score(PAIRS[:3], silent), atol=1e-6)
    assert main([*given, "--instruction", "Find the sea?"]) == 2
    assert "applies to --yes-no" in capsys.readouterr().err


def test_an_evaluation_ranks_by_yes_and_no(tmp_path, capsys):
    """Of two documents that BM25 finds, the one with the higher score comes first."""
    language_model(tmp_path / "model", True)
    documents = {"a": "the sea is blue", "b": "the sea is the sea"}
    data.RetrievalData(documents, {"q": "the sea"}, {"q": {"a": 1}}).save(tmp_path / "beir")
    given = ["evaluate", str(tmp_path / "model"), "--data", f"beir:{tmp_path / 'beir'}"]
    assert main([*given, "--yes-no"]) == 0
    scores = json.loads(capsys.readouterr().out)
    scorer = models.YesNoScorer.of_run(tmp_path / "model")
    of_a, of_b = scorer.score([("the sea", text) for text in documents.values()], silent)
    assert of_a != of_b
    assert scores["mrr@10"] == (1.0 if of_a > of_b else 0.5)
    assert main(["evaluate", str(tmp_path / "model"), "--yes-no"]) == 2
    assert "--yes-no applies to --data beir:FOLDER" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_scores_by_yes_and_no(tmp_path):
    language_model(tmp_path, True)
    functions, refused = row_functions(str(tmp_path), load_finite(tmp_path))
    rerank = next(function for kind, function in functions.items() if kind.name == "rerank")
    scorer = open_pair_scorer(tmp_path)
    tokens, _ = scorer.encode(PAIRS)
    rows = [tokens_of(tokens, i, length) for i, length in enumerate(tokens.lengths)]
    found = [one["scores"][0] for one in rerank.compute(rows)]
    np.testing.assert_allclose(found, scorer.score(PAIRS, silent), atol=1e-6)
    assert refused == []
    # A model without the tokens of the prompt or of the answers does not rank.
    assert answers_yes_or_no(tmp_path)
    for prompt in ({"yes": "yes, it does"}, {"before": "<|system|>"}):
        assert not answers_yes_or_no(tmp_path, models.YesNoPrompt(**prompt))


@pytest.mark.slow
def test_answers_are_single_tokens(tmp_path):
    language_model(tmp_path, True)
    scorer = models.YesNoScorer.of_run(tmp_path)
    with pytest.raises(UserError, match=r"answer 'yes, it does' .*one token"):
        scorer.with_prompt(models.YesNoPrompt(yes="yes, it does"))
