"""Ensembles, word vectors, and prompts that grow by their answers."""

import gzip
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.train.lectures.ensemble import mean_probabilities

PROMPTS = Path(__file__).parents[3] / "colab" / "prompts.jsonl"
SIZES = {"max_length": 16, "num_layers": 1, "d_model": 8, "num_heads": 2}


def saved(folder, tokenizer, number, make_config, **fields):
    """Run folders of models with different random parameters."""
    model = models.create(make_config(vocab_size=tokenizer.vocab_size, **SIZES, **fields))
    for seed in range(number):
        params = models.init_params(model, jax.random.key(seed))
        # Larger than usual, so that the models differ visibly.
        train.save_run(folder / str(seed), model, jax.tree.map(lambda x: 20 * x, params), tokenizer)
    return [folder / str(seed) for seed in range(number)]


@pytest.mark.slow
def test_an_ensemble_draws_tokens_from_the_mean_of_the_probabilities(tmp_path, assert_close):
    tokenizer = data.train_tokenizer(["abcdefgh "], data.TokenizerConfig("characters"))
    folders = saved(tmp_path, tokenizer, 2, models.GPTConfig)
    loaded = [models.load(folder) for folder in folders]
    ids = jnp.array([[1, 2, 3, 4]])
    single = [jax.nn.softmax(m.apply({"params": p}, input_ids=ids).logits) for m, p in loaded]
    assert_close(mean_probabilities(loaded, ids), (single[0] + single[1]) / 2)
    # The most probable token each time, also beyond the window of 16 tokens.
    ensemble = train.Ensemble(folders)
    text = ensemble.generate("abc", max_new_tokens=20, temperature=0)
    ids = [*tokenizer.begins_document, *tokenizer.encode("abc", add_special_tokens=False)]
    for _ in text:
        row = jnp.array([ids[-16:]])
        ids.append(int(mean_probabilities(loaded, row)[0, -1].argmax()))
    assert tokenizer.decode(ids) == f"abc{text}"
    drawn = {ensemble.generate("abc", max_new_tokens=8, seed=seed) for seed in (0, 0, 1, 2)}
    assert 1 < len(drawn) <= 3
    with pytest.raises(data.UserError, match="at least two"):
        train.Ensemble(folders[:1])
    with pytest.raises(data.UserError, match="no labels to predict"):
        ensemble.predict(["abc"])


@pytest.mark.slow
def test_an_ensemble_of_classifiers_predicts_the_mean(tmp_path):
    tokenizer = data.train_tokenizer(["a great food and a bad view"], data.TokenizerConfig("words"))
    labels = {"labels": ("no", "yes"), "head": "sequence_classification"}
    folders = saved(tmp_path, tokenizer, 3, models.BertConfig, **labels)
    texts = ["a great food", "a bad view"]
    each = [train.predict(folder, texts, log=lambda _: None) for folder in folders]
    together = train.Ensemble(folders).predict(texts, log=lambda _: None)
    for i in range(2):
        for label in labels["labels"]:
            mean = np.mean([rows[i]["probabilities"][label] for rows in each])
            assert together[i]["probabilities"][label] == pytest.approx(mean, abs=1e-5)
    other = saved(
        tmp_path / "b", tokenizer, 1, models.BertConfig, **(labels | {"labels": ("a", "b")})
    )
    with pytest.raises(data.UserError, match="labels no, yes, got a, b"):
        train.Ensemble([folders[0], *other]).predict(texts)


LINES = ["the 1 2 3", "cat -1 0.5 2e-1", ". . 4 5 6"]


@pytest.mark.parametrize("head", [[], ["3 3"]], ids=["glove", "word2vec"])
def test_embeddings_begin_as_the_vectors_of_a_file(tmp_path, head, assert_close):
    text = "\n".join([*head, *LINES]) + "\n"
    (tmp_path / "v.txt").write_text(text)
    (tmp_path / "v.txt.gz").write_bytes(gzip.compress(text.encode()))
    vectors = train.read_word_vectors(tmp_path / "v.txt")
    assert {word: row.tolist() for word, row in vectors.items()} == {
        "the": [1, 2, 3], "cat": [-1, 0.5, np.float32(0.2)], ". .": [4, 5, 6],
    }  # fmt: skip
    assert train.read_word_vectors(tmp_path / "v.txt.gz", {"cat"}).keys() == {"cat"}
    tokenizer = data.train_tokenizer(["the cat sat"], data.TokenizerConfig("words"))
    config = models.GPTConfig(
        vocab_size=tokenizer.vocab_size, **(SIZES | {"d_model": 3, "num_heads": 1})
    )
    params = models.init_params(models.create(config), jax.random.key(0))
    found = train.with_word_vectors(params, tokenizer, vectors)
    assert found.num_found == 2
    table = np.array(params["token_embedding"]["embedding"])
    for word in ("the", "cat"):
        (id,) = tokenizer.encode(word, add_special_tokens=False)
        table[id] = vectors[word]
    assert_close(found.params["token_embedding"]["embedding"], table)
    others = {**found.params, "token_embedding": params["token_embedding"]}
    jax.tree.map(np.testing.assert_array_equal, others, params)
    wide = {"token_embedding": {"embedding": np.zeros((9, 8))}}
    with pytest.raises(data.UserError, match=r"must have 8 numbers.* got 3"):
        train.with_word_vectors(wide, tokenizer, vectors)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 1 2\ncat 1 x\n", "line 2 must be a word and 2 numbers"),
        ("the 1 2\ncat 1\n", "line 2"),
        ("2 2\nthe 1 nan\n", "line 2"),
        ("", "no vector"),
    ],
)
def test_a_faulty_file_of_vectors_is_refused(tmp_path, text, message):
    (tmp_path / "v.txt").write_text(text)
    with pytest.raises(data.DataError, match=message):
        train.read_word_vectors(tmp_path / "v.txt")


def test_each_answer_is_appended_to_the_next_prompt():
    """With the printed answers, the loop makes the two prompts that the paper prints."""
    printed = {str(one.fields["name"]): one for one in models.read_prompts(str(PROMPTS))}
    chosen = [printed["farduddle"], printed["yalubalu"]]
    answers = {one.text: str(one.fields["answer"]) for one in chosen}
    pattern = data.PATTERNS["words"]
    whatpu = {
        "definition": 'A "whatpu" is a small, furry animal native to Tanzania.',
        "word": "whatpu",
        "sentence": "We were traveling in Africa and we saw these very cute whatpus.",
    }
    lines = [one.text.splitlines()[-1] for one in chosen]
    asked = [
        {"definition": line.partition(" An example of")[0], "word": str(one.fields["name"])}
        for line, one in zip(lines, chosen, strict=True)
    ]
    found = train.answer_in_turn(answers.__getitem__, pattern, [whatpu], asked)
    assert [row["sentence"] for row in found] == [text.strip() for text in answers.values()]
