from collections import Counter

import numpy as np
import pytest
from flaxzoo.data import DataError, TokenizerConfig, load_tokenizer, train_tokenizer
from flaxzoo.data.features.bio_tags import find_scheme, span_labels, to_bio
from flaxzoo.data.tasks.tagging_examples import TaggingExample
from flaxzoo.data.tasks.token_classification import (
    TokenClassificationData,
    tagged_examples,
    word_pieces,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture
def config(data_of_file):
    """`config(text, part, **fields)`: data of a file of these lines."""

    def make(text, part="", **fields):
        fields = {"length": 10, **fields}
        return data_of_file(TokenClassificationData, f"conll:a.conll{part}", text, **fields)

    return make


COLUMNS = """-DOCSTART- -X- O

EU NNP I-ORG
rejects VBZ O
German JJ I-MISC

Mr\u2028 NNP O
Bo NNP I-PER
Al NNP B-PER
"""


def test_columns(config, train, tokenizer):
    data = config(COLUMNS, length=32)
    split = train(data, tokenizer)
    assert split.examples.gold() == [["B-ORG", "O", "B-MISC"], ["O", "B-PER", "B-PER"]]
    assert next(example.words for example in split.content) == ("EU", "rejects", "German")
    assert split.summary == "2 sentences, 6 words, IOB1 tags converted to BIO"
    wanted = "O B-MISC B-ORG B-PER I-MISC I-ORG I-PER".split()
    assert data.labels() == tuple(wanted)
    row = split.examples.example(0, 0)
    assert tokenizer.decode(row["input_ids"]) == "eu rejects german"
    predicted = np.flatnonzero(row["labels"] != -100)
    assert predicted.tolist() == [1, 3, 10]  # e ##u r ##e …
    assert row["labels"][predicted].tolist() == [2, 0, 1]
    assert row["attention_mask"].sum() == 17
    assert not row["token_type_ids"].any()


@pytest.mark.parametrize("column", ["0", "1", "-1", "tag"])
def test_a_column_that_cannot_have_tags_is_refused(config, column):
    with pytest.raises(DataError, match=f"from 2, got '{column}'"):
        config(COLUMNS, f"#{column}", length=32).labels()


def test_another_column(config, train, tokenizer):
    data = config(COLUMNS, "#2", length=32)
    assert data.labels() == ("JJ", "NNP", "VBZ")  # plain tags are left as they are
    assert train(data, tokenizer).examples.gold()[0] == ["NNP", "VBZ", "JJ"]


def test_columns_with_blanks_are_separated_by_tabs(config, train, tokenizer):
    split = train(config("new york\tB-LOC\nis\tO\n\t\nx\tO\n"), tokenizer)
    assert [example.words for example in split.content] == [("new york", "is"), ("x",)]


@pytest.mark.parametrize(
    ("text", "part", "message"),
    [
        ("a O\nb x O\n", "", "a.conll line 2 .*3 columns .* 2"),
        ("a\n", "", "a.conll line 1 .*without a tag: 'a'"),
        ("a\tX\nb\t\n", "", "line 2 .*without a tag"),
        ("a\tX\nb X\n", "", "line 2 .*1 column .* 2: .*tabs"),
        ("a O\n", "#4", "line 1 .*2 columns, .*tag column .*4"),
        ("a O\n", "#1", "from 2, got '1'"),
        ("a B-X\nb O\n\nc B_X\n", "", "line 4 .*tag 'B_X'"),
        ("a B-X\nb I-X\nc O\nd I-X\n", "", "line 4 .*tag 'I-X'.* BIO"),
        ("a S-X\nb E-X\n", "", "line 2 .*tag 'E-X'.* BIOES"),
        ("a S-X\n\nb B-X\nc O\n", "", "line 3 .*tag 'B-X'.* BIOES"),
    ],
)
def test_bad_columns(config, train, tokenizer, text, part, message):
    with pytest.raises(DataError, match=message) as caught:
        train(config(text, part), tokenizer)
    assert "\n" not in str(caught.value)


def test_a_tag_that_continues_nothing(config, tokenizer, tmp_path):
    data = config("a B-X\nb I-X\nc O\n")
    (tmp_path / "v").write_text("a B-X\n\nb O\nc I-X\nd I-X\n\ne B-X\n")
    split = data.whole_source(f"conll:{tmp_path}/v", tokenizer, data.labels())
    assert split.examples.gold() == [["B-X"], ["O", "B-X", "I-X"], ["B-X"]]
    assert "1 tags I- do not continue a span and are read as B- (" in split.summary
    assert split.summary.endswith("v line 4)")
    with pytest.raises(DataError, match=r"v line 4 .*tag 'I-X'"):  # not trained on
        TokenClassificationData(
            source=f"conll:{tmp_path}/v", tokenizer=TokenizerConfig(), length=10
        ).labels()


def test_documents_stay_together(config, train, tokenizer):
    documents = [
        "-DOCSTART- O\n\n" + "\n\n".join(f"d{i} O\nw{j} B-X" for j in range(3)) for i in range(40)
    ]
    data = config("\n\n".join(documents) + "\n", validation_fraction=0.3)
    parts = [
        {example.words[0] for example in split.content}
        for split in (train(data, tokenizer), data.validation_split(tokenizer, data.labels()))
    ]
    assert not parts[0] & parts[1]
    assert len(parts[0] | parts[1]) == 40
    one = config(documents[0] + "\n", validation_fraction=0.3)  # nothing to part but sentences
    assert len(one.validation_split(tokenizer, data.labels()).content) < 3


def test_unknown_tag_in_validation(config, tokenizer, tmp_path):
    data = config("a B-X\n")
    (tmp_path / "v").write_text("-DOCSTART- O\n\na O\nb B-Y\n")
    with pytest.raises(DataError, match=r"v line 4.*label 'B-Y'"):
        data.whole_source(f"conll:{tmp_path}/v", tokenizer, data.labels())


def test_a_long_sentence_continues_in_the_next_sequence(config, train, tokenizer):
    split = train(config("ab O\ncdef B-X\nghi O\njklmnopqrst B-X\nu O\n"), tokenizer)
    decoded = [tokenizer.decode(split.examples.example(0, i)["input_ids"]) for i in range(4)]
    assert decoded == ["ab cdef", "ghi", "jklmnopq", "u"]
    assert "5 words, 4 rows of 10 tokens" in split.summary


def labels_of(rows):
    return np.stack([rows.example(0, i)["labels"] for i in range(rows.num_examples)])


def test_words_without_a_token(config, train, tokenizer):
    rows = train(config("a B-X\n\u200d\tB-X\n".replace("a ", "a\t")), tokenizer).examples
    assert "1 word without a token" in rows.notes
    predictions = {"label_ids": np.full((1, 10), 2), "probabilities": np.full((1, 10), 0.5)}
    assert rows.decode(predictions) == [
        {"words": ["a", "\u200d"], "tags": ["I-X", "O"], "probabilities": [0.5, 0.0]}
    ]
    assert rows.gold() == [["B-X", "B-X"]]


WORD = st.text(st.sampled_from("abcé日-. \u0301\u200d\x00"), min_size=1, max_size=15)
TAG = st.sampled_from(["O", "B-X", "I-X", "B-Y"])
SENTENCES = st.lists(st.lists(st.tuples(WORD, TAG), min_size=1, max_size=12), min_size=1)


@given(SENTENCES, st.integers(8, 24))
def test_every_word_is_predicted_once(tokenizer, sentences, length):
    labels = ("O", "B-X", "B-Y", "I-X", "I-Y")
    examples = [
        TaggingExample(tuple(w for w, _ in s), tuple(t for _, t in s), "here") for s in sentences
    ]
    rows = tagged_examples(examples, tokenizer, labels, length)
    ids = labels_of(rows)
    pieces = [ids for e in examples for ids, _ in word_pieces(e.words, tokenizer)]
    assert (ids != -100).sum() == sum(map(bool, pieces))
    decoded = [example["tags"] for example in rows.decode({"label_ids": ids})]
    flat = [tag for sentence in rows.gold() for tag in sentence]
    kept = [tag if piece else "O" for tag, piece in zip(flat, pieces, strict=True)]
    assert [tag for sentence in decoded for tag in sentence] == kept
    assert list(map(len, decoded)) == list(map(len, sentences))
    masks = [rows.example(0, i)["attention_mask"].astype(bool) for i in range(len(ids))]
    assert all((row[~mask] == -100).all() for row, mask in zip(ids, masks, strict=True))


@given(st.lists(st.text(st.sampled_from("abé日-"), min_size=1, max_size=6), min_size=1))
def test_words_are_tokenized_as_in_their_sentence(tokenizer, words):
    together = tokenizer.encode(" ".join(words), add_special_tokens=False)
    pieces = word_pieces(words, tokenizer)
    assert [id for ids, _ in pieces for id in ids] == together
    alone = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    assert [ids for ids, _ in pieces] == alone  # WordPiece: no word depends on another
    assert all(mark == 0 for _, mark in pieces)


def test_words_are_tokenized_as_by_the_library(datasets):
    """Against the tokenizers library's own alignment of words given one by one."""
    tokenizer = load_tokenizer(datasets / "tok/bert_base_uncased_vocab.txt")
    source = f"conll:{datasets}/ner/wnut17.dev.conll.gz"
    config = TokenClassificationData(source=source, tokenizer=TokenizerConfig(), length=64)
    for example in config.whole_source(source, tokenizer, config.labels()).content[:400]:
        theirs = tokenizer._backend.encode(
            list(example.words), is_pretokenized=True, add_special_tokens=False
        )
        by_word = [[] for _ in example.words]
        for id, word in zip(theirs.ids, theirs.word_ids, strict=True):
            by_word[word].append(id)
        assert [ids for ids, _ in word_pieces(example.words, tokenizer)] == by_word


@pytest.mark.parametrize(
    ("kind", "size"), [("byte-bpe", 300), ("sentencepiece-unigram", 400), ("characters", None)]
)
def test_any_tokenizer(prose, kind, size):
    tokenizer = train_tokenizer(prose, TokenizerConfig(kind=kind, vocab_size=size))
    words = ["The", "statement", "x", "is", "new"]
    pieces = word_pieces(words, tokenizer)
    for word, (ids, mark) in zip(words, pieces, strict=True):
        assert tokenizer.decode(ids).strip() == word
        assert tokenizer.decode(ids[mark:]).strip() == word
        assert 0 <= mark < len(ids)


def entities(tags):
    """The spans of BIO tags, read in the plainest way."""
    found, start = set(), None
    for i, tag in enumerate([*tags, "O"]):
        if start is not None and not tag.startswith("I-"):
            found.add((start, i, tags[start][2:]))
            start = None
        if tag.startswith("B-"):
            start = i
    return found


@st.composite
def spans(draw):
    """A sentence's spans: (first word, end, type), and its number of words."""
    found, offset = [], 0
    for _ in range(draw(st.integers(0, 5))):
        start = offset + draw(st.integers(0, 2))
        offset = start + draw(st.integers(1, 3))
        found.append((start, offset, draw(st.sampled_from(["X", "Y"]))))
    return found, offset + draw(st.integers(0, 2))


def as_tags(sentence, scheme):
    found, length = sentence
    tags = ["O"] * length
    for start, end, kind in found:
        marks = ["I"] * (end - start)
        if scheme == "BIOES":
            marks[0], marks[-1] = "B", "E"
            marks = ["S"] if len(marks) == 1 else marks
        elif scheme == "BIO" or (start and tags[start - 1] in (f"I-{kind}", f"B-{kind}")):
            marks[0] = "B"
        tags[start:end] = [f"{mark}-{kind}" for mark in marks]
    return tags


@given(st.lists(spans(), min_size=1), st.sampled_from(["BIO", "IOB1", "BIOES"]))
def test_schemes_are_found_and_keep_every_span(sentences, scheme):
    tags = [as_tags(sentence, scheme) for sentence in sentences]
    found = find_scheme(tags)
    marks = {tag[0] for sentence in tags for tag in sentence}
    if marks & {"S", "E"} or scheme != "BIOES":
        assert found == scheme or marks <= {"O"}
    else:
        assert found == "BIO"  # of no span at all
    for sentence, converted in zip(sentences, (to_bio(t, found) for t in tags), strict=True):
        assert entities(converted) == set(sentence[0])
        assert find_scheme([converted]) == "BIO"


def test_bilou():
    tags = [["B-X", "I-X", "L-X", "U-Y", "O"]]
    assert find_scheme(tags) == "BIOES"
    assert to_bio(tags[0], "BIOES") == ("B-X", "I-X", "I-X", "B-Y", "O")


def test_labels_of_spans():
    assert span_labels(["B-X", "O", "I-Y"]) == ("O", "B-X", "B-Y", "I-X", "I-Y")
    assert span_labels(["NN", "DT"]) == ("DT", "NN")


def test_input(config, tokenizer, tmp_path):
    data = config("a B-X\n")
    (tmp_path / "in.txt").write_text("ab c\n\n d e\n")
    split = data.input_split(f"{tmp_path}/in.txt", tokenizer, data.labels())
    assert [example.words for example in split.content] == [("ab", "c"), (), ("d", "e")]
    assert set(split.examples.example(0, 0)) == {"input_ids", "attention_mask", "token_type_ids"}
    decoded = split.examples.decode({"label_ids": np.ones((3, 10), int)})
    assert decoded[0] == {"words": ["ab", "c"], "tags": ["B-X", "B-X"]}
    assert decoded[1] == {"words": [], "tags": []}  # a prediction for each line
    (tmp_path / "in.conll").write_text("ab X\nc X\n\nd X\n")
    (tmp_path / "in").write_text("ab\nc\n\nd\n")
    for path in (f"{tmp_path}/in.conll", f"conll:{tmp_path}/in"):
        split = data.input_split(path, tokenizer, data.labels())
        assert [e.words for e in split.content] == [("ab", "c"), ("d",)]
    (tmp_path / "in.jsonl").write_text('{"tokens": ["ab", 3], "tags": null}\n')
    for path in (f"{tmp_path}/in.jsonl", f"jsonl:{tmp_path}/in.jsonl"):
        split = data.input_split(path, tokenizer, data.labels())
        assert [(e.words, e.tags) for e in split.content] == [(("ab", "3"), None)]


def test_json_lines(data_of_file, train, tokenizer):
    row = '{"tokens": ["a", "b"], "tags": ["B-X", "O"]}\n'
    data = data_of_file(TokenClassificationData, "jsonl:a.jsonl", row, length=10)
    assert train(data, tokenizer).examples.gold() == [["B-X", "O"]]


@pytest.mark.parametrize(
    ("words", "tags", "message"),
    [
        ('["a", "b"]', '["B-X"]', "line 1 .*2 words .*1 tags"),
        ('["a", "b"]', '["B-X", null]', "None .*tags"),
        ('["a", "b"]', '["B-X", ""]', "'' .*tags"),
        ('["a", "b"]', '["B-X", true]', "True .*tags"),
        ('["a", null]', '["O", "O"]', "line 1 .*None .*words"),
        ('"a b"', '"O O"', "line 1 .*list of words"),
        ('["a"]', '"O"', "line 1 .*list of tags"),
    ],
)
def test_bad_json_lines(data_of_file, words, tags, message):
    row = f'{{"tokens": {words}, "tags": {tags}}}\n'
    with pytest.raises(DataError, match=message):
        data_of_file(TokenClassificationData, "jsonl:a.jsonl", row, length=10).labels()


@pytest.mark.slow
def test_real_files(datasets):
    tokenizer = load_tokenizer(datasets / "tok/bert_base_uncased_vocab.txt")

    def load(source):
        config = TokenClassificationData(
            source=f"conll:{datasets}/ner/{source}", tokenizer=TokenizerConfig(), length=64
        )
        split = config.whole_source(config.source, tokenizer, config.labels())
        gold = split.examples.gold()
        decoded = split.examples.decode({"label_ids": labels_of(split.examples)})
        found = Counter(tag[2:] for tags in gold for tag in tags if tag.startswith("B-"))
        return split, gold, [one["tags"] for one in decoded], found

    split, gold, decoded, found = load("conll2003.eng.train.gz")
    assert (len(gold), sum(map(len, gold))) == (14041, 203621)
    assert found == {"LOC": 7140, "MISC": 3438, "ORG": 6321, "PER": 6600}
    assert decoded == gold
    assert "IOB1 tags converted to BIO" in split.summary
    split, gold, decoded, found = load("wnut17.train.conll.gz")
    assert (len(gold), sum(map(len, gold))) == (3394, 62730)
    assert decoded == gold
    assert "converted" not in split.summary
    _, gold, decoded, found = load("wnut17.dev.conll.gz")
    assert (len(gold), sum(found.values())) == (1009, 836)
    split, gold, decoded, found = load("conll2003.eng.testa.gz")
    assert (len(gold), sum(map(len, gold))) == (3250, 51362)
    assert found == {"PER": 1842, "LOC": 1837, "ORG": 1341, "MISC": 922}
    assert decoded == gold
