"""Documents that a selector leaves out of what `prepare` writes."""

import dataclasses
import json
import pickle

import pytest
from flaxzoo import data
from flaxzoo.data.prepared.shard_format import read_settings


@dataclasses.dataclass(frozen=True)
class Without:
    """Keeps the texts that lack a word."""

    word: str

    @property
    def name(self):
        return f"the classifier {self.word}"

    @property
    def fingerprint(self):
        return f"without {self.word}"

    def __call__(self, texts):
        return [self.word not in text for text in texts]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FLAXZOO_CACHE", str(tmp_path / "cache"))


TEXTS = [f"{'junk' if i % 3 == 0 else 'fine'} text {i} here" for i in range(30)]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join([*TEXTS[:20], TEXTS[0]]))
    (tmp_path / "b.txt").write_text("\n".join(TEXTS[20:]))
    return f"text:{tmp_path}/a.txt#line + text:{tmp_path}/b.txt#line"


def test_prepare_leaves_out_and_counts(source, tmp_path):
    letters = data.TokenizerConfig("characters")
    data.train_tokenizer(TEXTS, letters).save(tmp_path / "letters")
    settings = {"tokenizer": tmp_path / "letters", "length": 8, "validation_fraction": 0.2}
    selector = pickle.loads(pickle.dumps(Without("junk")))
    shards = data.prepare(source, tmp_path / "rows", selector=selector, **settings)
    assert [shard.left_out for shard in shards] == [
        {"the classifier junk": 8},
        {"the classifier junk": 3},
    ]
    manifest = json.loads((tmp_path / "rows" / "manifest.json").read_text())
    assert manifest["left_out"] == {"the classifier junk": 11}
    assert manifest["keep"] == "the classifier junk without junk"
    assert read_settings(tmp_path / "rows").keep == manifest["keep"]
    plain = data.prepare(source, tmp_path / "plain", **settings)
    documents = [
        sum(rows.documents for shard in made for rows in shard.splits.values())
        for made in (shards, plain)
    ]
    assert documents == [20, 31]
    assert [shard.left_out for shard in plain] == [{}, {}]
    with pytest.raises(data.DataError, match=r"rows .*\(keep 'the"):
        data.prepare(source, tmp_path / "rows", **settings)
    with pytest.raises(data.DataError, match=r"31 documents .*classifier te"):
        data.prepare(source, tmp_path / "none", selector=Without("text"), **settings)


def test_prepare_counts_what_a_filter_leaves_out(tmp_path):
    rows = [{"text": text, "score": i} for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data.train_tokenizer(TEXTS, data.TokenizerConfig("characters")).save(tmp_path / "letters")
    data.prepare(
        f"jsonl:{tmp_path}/a.jsonl#text?score>=6",
        tmp_path / "rows",
        tmp_path / "letters",
        length=8,
        validation_fraction=0.2,
        selector=Without("junk"),
    )
    manifest = json.loads((tmp_path / "rows" / "manifest.json").read_text())
    assert manifest["left_out"] == {"the filter score>=6": 6, "the classifier junk": 8}


def test_documents_of_several_sources_are_labeled(source, tmp_path, train, tokenizer):
    a, b = source.split(" + ")
    name = f"corpora:good={a} | crawl={b} + jsonl:{tmp_path}/c.jsonl#text?score>1"
    rows = [{"text": "from json", "score": 2}, {"text": "low", "score": 1}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = data.SequenceClassificationData(
        source=name, length=16, tokenizer=data.TokenizerConfig(), validation_fraction=0.0
    )
    assert config.labels() == ("crawl", "good")
    split = train(config, tokenizer)
    assert split.notes == ("labels: crawl (11), good (21)",)
    assert [example.text for example in split.content[-2:]] == [TEXTS[-1], "from json"]
    unlabeled = config.input_split(name, tokenizer, config.labels())
    assert [example.text for example in unlabeled.content] == [e.text for e in split.content]
    with pytest.raises(data.DataError, match="write corpora:LABEL=SOUR"):
        dataclasses.replace(config, source=f"corpora:good={a}").labels()
    with pytest.raises(data.DataError, match="got 'corpora'"):
        data.load_documents(name, "train", validation_fraction=0.0)
