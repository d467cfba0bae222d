import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
from flaxzoo import train
from flaxzoo.data import (
    CausalLMData,
    DataError,
    Documents,
    Examples,
    MultipleChoiceData,
    PretrainingData,
    QuestionAnsweringData,
    SequenceClassificationData,
    TokenClassificationData,
    TokenizerConfig,
    TranslationData,
    build_corpus,
    load_documents,
    load_whole,
    prepare,
    train_iterator,
    train_tokenizer,
)
from flaxzoo.data.sources.parallel_corpus import open_parallel

TEXTS = [f"the cat number {i} sat on a mat. It slept there." for i in range(40)]
WORDPIECE = TokenizerConfig("wordpiece", 100)

CLASSIFIED = [{"text": text, "label": ("no", "yes")[i % 2]} for i, text in enumerate(TEXTS)]
PAIRED = [{**row, "text_b": "a dog"} for row in CLASSIFIED]
TAGGED = [{"tokens": text.split(), "tags": ["O", "B-A", *"OOOOOOOOO"]} for text in TEXTS]
QUESTIONS = [
    {
        "context": text,
        "question": "who sat",
        "answers": [{"text": "cat", "answer_start": 4}],
        "id": str(i),
    }
    for i, text in enumerate(TEXTS)
]
CHOICES = [{"context": text, "choices": ["sat", "flew"], "label": 0} for text in TEXTS]
TRANSLATED = [(text, text[::-1]) for text in TEXTS]

EVERY_KIND = [
    (CausalLMData, TEXTS, {}),
    (CausalLMData, Documents.of(TEXTS), {}),
    (CausalLMData, [{"text": text} for text in TEXTS], {}),
    (PretrainingData, Documents.of(TEXTS), {}),
    (SequenceClassificationData, CLASSIFIED, {}),
    (SequenceClassificationData, PAIRED, {}),
    (SequenceClassificationData, [{**r, "label": i} for i, r in enumerate(CLASSIFIED)],
     {"target": "regression"}),
    (TokenClassificationData, TAGGED, {}),
    (QuestionAnsweringData, QUESTIONS, {"stride": 8}),
    (MultipleChoiceData, CHOICES, {}),
    (TranslationData, TRANSLATED,
     {"tokenizer": TokenizerConfig("sentencepiece-bpe", 300), "length": 64}),
]  # fmt: skip


def make(kind, source, **settings):
    return kind(**{"source": source, "length": 32, "tokenizer": WORDPIECE, **settings})


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAXZOO_CACHE", str(tmp_path / "cache"))


def causal_tokenizer(config):
    """A tokenizer for this kind of data."""
    if isinstance(config, CausalLMData):
        config = dataclasses.replace(config, tokenizer=TokenizerConfig("byte-bpe", 300))
    return config.make_tokenizer()


@pytest.mark.parametrize(("kind", "source", "settings"), EVERY_KIND)
def test_every_kind_of_data_takes_examples(kind, source, settings):
    config = make(kind, source, validation_fraction=0.2, **settings)
    tokenizer, labels = causal_tokenizer(config), config.labels()
    split = config.train_split(tokenizer, labels, 0)
    held_out = config.validation_split(tokenizer, labels)
    spec = config.batch_spec(len(labels), 2)
    for examples in (split.examples, held_out.examples):
        example = examples.example(0, 0)
        assert {name: (x.shape, x.dtype) for name, x in example.items()} == {
            name: (array.shape, array.dtype) for name, array in spec.items()
        }
    whole = config.whole_source(source, tokenizer, labels)
    assert whole.examples.num_examples >= held_out.examples.num_examples
    # A worker process gets arrays, and a copy of the configuration keeps its examples.
    pickle.loads(pickle.dumps(split.examples)).example(1, 0)
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert copied.train_split(tokenizer, labels, 0).fingerprint == split.fingerprint


@pytest.mark.parametrize(
    ("kind", "rows", "fields"),
    [
        (SequenceClassificationData, CLASSIFIED, ""),
        (SequenceClassificationData, PAIRED, "#label,text,text_b"),
        (TokenClassificationData, TAGGED, ""),
        (MultipleChoiceData, CHOICES, ""),
    ],
)
def test_examples_equal_those_of_a_file(tmp_path, tokenizer, kind, rows, fields):
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    splits = []
    for source in (rows, f"jsonl:{path}{fields}"):
        config = make(kind, source, validation_fraction=0.3)
        splits.append(
            (
                config.train_split(tokenizer, config.labels(), 0),
                config.validation_split(tokenizer, config.labels()),
            )
        )
    for ours, theirs in zip(*splits, strict=True):
        assert ours.fingerprint == theirs.fingerprint
        assert ours.summary == theirs.summary
        for name, array in ours.examples.example(0, 0).items():
            np.testing.assert_array_equal(array, theirs.examples.example(0, 0)[name])


def test_documents_equal_those_of_a_file(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) + "\n")
    for split in ("train", "validation"):
        ours, theirs = (
            load_documents(source, split, validation_fraction=0.3)
            for source in (Documents.of(TEXTS), f"text:{tmp_path}/a.txt#line")
        )
        assert list(ours) == list(theirs)
        assert ours.fingerprint == theirs.fingerprint
    assert sorted(load_whole(TEXTS)) == sorted(TEXTS)
    translated = open_parallel(TRANSLATED, "whole")
    assert list(zip(translated.sources, translated.targets, strict=True)) == TRANSLATED


def test_documents_in_memory_are_a_sequence(tmp_path):
    documents = Documents.of(TEXTS, lines_are_sentences=True)
    assert len(documents) == 40
    assert (documents[0], documents[-1]) == (TEXTS[0], TEXTS[-1])
    assert list(documents) == TEXTS
    assert documents.fingerprint != Documents.of(TEXTS[::-1]).fingerprint
    tokenizer = train_tokenizer(documents, TokenizerConfig("byte-bpe", 300))
    assert build_corpus(documents, tokenizer, tmp_path).num_documents == 40
    assert load_whole(documents).lines_are_sentences
    assert not load_whole(Documents.of(TEXTS)).lines_are_sentences


def test_joined_documents_keep_whether_a_line_is_a_sentence(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} {text}" for text in TEXTS))
    a, b, c = (f"text:{tmp_path}/{name}.txt#" for name in "abc")
    alike = load_whole(f"{a}sentences + {b}sentences")
    assert load_whole(alike).lines_are_sentences
    assert not load_whole(load_whole(f"{a}line + {c}line")).lines_are_sentences
    with pytest.raises(DataError, match="joined documents"):
        load_whole(load_whole(f"{a}sentences + {c}line"))


def test_a_description_stands_for_the_examples():
    source = make(SequenceClassificationData, CLASSIFIED).source
    assert source.startswith("memory:40 examples blake2b:")
    assert source.endswith("#label,text")
    assert make(SequenceClassificationData, list(CLASSIFIED)).source == source
    assert make(SequenceClassificationData, CLASSIFIED[::-1]).source != source
    changed = [{**CLASSIFIED[0], "label": "yes"}, *CLASSIFIED[1:]]
    assert make(SequenceClassificationData, changed).source != source
    assert make(CausalLMData, TEXTS).source == Examples.of(TEXTS)


def test_other_names_of_fields(tokenizer):
    rows = [{"stars": i % 2, "review": text} for i, text in enumerate(TEXTS)]
    source = Examples.of(rows, fields="stars,review")
    config = make(SequenceClassificationData, source, validation=rows[:4])
    labels = config.labels()
    assert labels == ("0", "1")
    assert config.validation.endswith("#stars,review")  # those of the source
    assert len(config.validation_split(tokenizer, labels).content) == 4
    assert len(config.whole_source(rows[:3], tokenizer, labels).content) == 3
    body = make(CausalLMData, Examples.of(rows, fields="review"))
    assert set(body.texts()) < set(TEXTS)


def test_numpy_values_and_mappings(tokenizer):
    rows = [{"text": t, "label": np.int64(i % 2)} for i, t in enumerate(TEXTS)]
    assert make(SequenceClassificationData, rows).labels() == ("0", "1")
    tagged = [{"tokens": np.array(["a", "b"]), "tags": ("B-X", "O")}]
    config = make(TokenClassificationData, tagged, validation_fraction=0.0)
    split = config.train_split(tokenizer, config.labels(), 0)
    assert split.examples.gold() == [["B-X", "O"]]


def test_examples_to_predict(tokenizer):
    config = make(SequenceClassificationData, CLASSIFIED)
    for given in (["a b", "c"], [{"text": "a b"}, {"text": "c", "label": "?"}]):
        split = config.input_split(given, tokenizer, ("no", "yes"))
        assert [example.text for example in split.content] == ["a b", "c"]
    tags = make(TokenClassificationData, TAGGED)
    split = tags.input_split([{"tokens": ["a", "b"]}], tokenizer, tags.labels())
    assert split.content[0].words == ("a", "b")
    questions = [{key: QUESTIONS[0][key] for key in ("context", "question")}]
    spans = make(QuestionAnsweringData, QUESTIONS, stride=8)
    questions[0]["id"] = "x"
    assert spans.input_split(questions, tokenizer, ()).content[0].id == "x"
    chosen = make(MultipleChoiceData, CHOICES)
    rows = [{"context": "it", "choices": ["a", "b"]}]
    assert chosen.input_split(rows, tokenizer, ()).content[0].choices == ("a", "b")


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (CausalLMData, [], "examples .*empty"),
        (CausalLMData, [" ", "\n"], "no text .*'memory:2 examples"),
        (CausalLMData, CLASSIFIED + TEXTS, r"examples\[40\] .*str"),
        (CausalLMData, TAGGED, r"examples\[0\] .*'text': .*tokens, tags"),
        (CausalLMData, [{"text": 3}], r"examples\[0\] field 'text' .* int"),
        (CausalLMData, [3], r"examples\[0\] .* int"),
        (CausalLMData, ["a\ud800"], r"examples\[0\] field 'text' .*surrogate"),
        (CausalLMData, {"text": ["a"]}, "got a dict"),
        (SequenceClassificationData, TEXTS, r"examples\[0\] .*label, text"),
        (SequenceClassificationData, [{"text": "a"}], r"examples\[0\] .*'label'"),
        (SequenceClassificationData, [{"text": "a", "label": object()}],
         r"examples\[0\] cannot"),
        (SequenceClassificationData, [{"text": "a", "label": float("nan")}], "cannot be recorded"),
        (SequenceClassificationData, [("good", "a fine film")], "source, target"),
        (SequenceClassificationData, [{"text": "a", "label": "x"}, {"text": "b", "label": "y",
         "text_b": "c"}], r"examples\[0\] .*'text_b'"),
        (CausalLMData, [b"\xff\xfe"], r"examples\[0\] .*recorded"),
        (TokenClassificationData, [{"tokens": ["a"], "tags": []}], r"examples\[0\] .*1 words"),
    ],
)  # fmt: skip
def test_faulty_examples_are_refused_in_one_line(tokenizer, kind, source, message):
    def use():
        config = make(kind, source)
        list(config.texts())
        config.train_split(tokenizer, config.labels(), 0)

    with pytest.raises(DataError, match=message) as caught:
        use()
    assert "\n" not in str(caught.value)


def test_examples_that_are_not_there(tmp_path, tokenizer):
    for kind, source in (
        (CausalLMData, TEXTS), (SequenceClassificationData, CLASSIFIED),
        (TranslationData, TRANSLATED),
    ):  # fmt: skip
        recorded = json.loads(json.dumps(make(kind, source).source))
        config = make(kind, recorded)
        with pytest.raises(DataError, match=r"'memory:40 .*' .*in Python"):
            list(config.texts())
    # The fields are recorded, so that the model can still be used.
    recorded = str(make(SequenceClassificationData, PAIRED).source)
    config = make(SequenceClassificationData, recorded)
    assert len(config.whole_source(PAIRED[:3], tokenizer, ("no", "yes")).content) == 3
    (tmp_path / "in").write_text("a\tb\n")
    assert config.examples_to_predict(str(tmp_path / "in"), set())[0].texts == ("a", "b")
    with pytest.raises(DataError, match="memory:"):
        prepare(Examples.of(TEXTS), tmp_path / "p", tmp_path / "t", length=8)


@pytest.mark.slow
def test_workers_change_nothing(tokenizer):
    config = make(SequenceClassificationData, CLASSIFIED)
    rows = config.train_split(tokenizer, config.labels(), 0).examples
    runs = []
    for workers in (0, 1):
        iterator = train_iterator(rows, batch_size=4, seed=0, num_steps=3, num_workers=workers)
        runs.append(list(iterator))
        iterator.close()
    for one, other in zip(*runs, strict=True):
        assert all((one[name] == other[name]).all() for name in (*one, *other))


@pytest.mark.slow
def test_a_run_on_examples_in_memory_resumes_and_is_used(tmp_path):
    config = train.recipe("bert-classify")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, d_model=16, num_layers=1, num_heads=2),
        data=dataclasses.replace(
            config.data, source=CLASSIFIED, tokenizer=WORDPIECE, validation_fraction=0.2
        ),
        steps=2,
        epochs=0.0,
        batch_size=8,
    )
    result = train.train(config, tmp_path / "run", quiet=True)
    assert result.finished
    recorded = json.loads((tmp_path / "run/config.json").read_text())["train"]["data"]
    assert recorded["source"] == config.data.source
    again = dataclasses.replace(config.data, source=list(CLASSIFIED))
    assert (
        train.train(dataclasses.replace(config, data=again), tmp_path / "run", quiet=True).step == 2
    )
    other = dataclasses.replace(config.data, source=CLASSIFIED[1:])
    with pytest.raises(train.RunError, match=r"data.source 'memory:40 .*' → 'memory:39 "):
        train.train(dataclasses.replace(config, data=other), tmp_path / "run", quiet=True)
    lines = []
    scores = train.score_run(tmp_path / "run", CLASSIFIED[:8], log=lines.append)
    assert 0 <= scores["accuracy"] <= 1
    assert lines == ["data: 8 examples", "data: labels: no (4), yes (4)"]
    with pytest.raises(DataError, match="in Python"):
        train.score_run(tmp_path / "run")
    predicted = train.predict(tmp_path / "run", ["the cat sat", "a mat"])
    assert [p["text"] for p in predicted] == ["the cat sat", "a mat"]
