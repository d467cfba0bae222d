"""The fingerprints of data never change, or no run that began before could be resumed."""

import json

import pytest
from flaxzoo.data import SpecialIds, Tokenizer, TokenizerConfig
from flaxzoo.train.objectives.tasks import data_class


class Letters(Tokenizer):
    """One token per character, with every special token."""

    kind = "letters"
    vocab_size = 64
    special_ids = SpecialIds(pad=0, unk=1, bos=2, eos=3, cls=2, sep=3, mask=4)
    fingerprint = "letters"

    def encode_with_offsets(self, text, add_special_tokens=True):
        spans = [(i, i + 1) for i in range(len(text))]
        return [8 + ord(letter) % 56 for letter in text], spans

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))

    def token(self, id):
        return str(id)

    def save_vocabulary(self, folder):
        raise NotImplementedError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fingerprints")
    texts = ["the cat sat. It saw a dog.", "a mat lay there. It was red.", "dogs run. Cats sit."]
    (folder / "plain.txt").write_text("\n\n".join(texts) + "\n")
    (folder / "labels.tsv").write_text("".join(f"{i % 2}\t{t}\n" for i, t in enumerate(texts)))
    (folder / "several.tsv").write_text("".join(f"a,b\t{t}\n" for t in texts))
    (folder / "words.conll").write_text("the O\ncat B-A\n\na O\ndog B-A\n")
    answer = {"text": "cat", "answer_start": 4}
    question = {"id": "q", "question": "who sat", "answers": [answer]}
    paragraphs = [{"context": texts[0], "qas": [question]}]
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    choice = {"context": "the cat", "choices": ["sat", "flew"], "label": 0}
    (folder / "choices.jsonl").write_text(json.dumps(choice) + "\n")
    (folder / "pairs.tsv").write_text("the cat\tle chat\na dog\tun chien\n")
    return folder


@pytest.mark.parametrize(
    ("kind", "source", "settings", "fingerprint"),
    [
        ("causal", "text:plain.txt#block", {}, "bd8045d125cf3f7d6d3b87e229fd1a27"),
        ("pretraining", "text:plain.txt#block", {}, "89468b056c6687282a90323756c402f9"),
        ("classify", "tsv:labels.tsv", {}, "96c6042860ec46d0ddd82fd9b81f0616"),
        ("classify", "tsv:several.tsv", {"target": "several"}, "7c3eb991bf321e8aa69e5e56d1c8d90d"),
        ("classify", "tsv:labels.tsv", {"target": "score"}, "9ee3dea68498ac881334619eaa1d648c"),
        ("tag", "conll:words.conll", {}, "87c65b26ea31b47ac9103c2545a4673c"),
        ("span", "squad:squad.json", {"stride": 4}, "7741ef26f8228cc5fc5e938453716024"),
        ("choice", "jsonl:choices.jsonl", {}, "2c50d1fcb7819b13dd0af8eae9124cd4"),
        ("translation", "tsv:pairs.tsv#1,2", {}, "9e6c40f9817ffc4acb2c3f0612679aaa"),
    ],
)
def test_fingerprints_are_those_of_the_first_version(folder, kind, source, settings, fingerprint):
    form, name = source.split(":")
    source = f"{form}:{folder}/{name}"
    data = data_class(kind)(
        source=source,
        validation=source,
        length=32,
        tokenizer=TokenizerConfig("wordpiece", 64),
        **settings,
    )
    split = data.train_split(Letters(), data.labels(), 0)
    assert split.fingerprint == fingerprint
