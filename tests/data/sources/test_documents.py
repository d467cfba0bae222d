import os
import re
import subprocess
import sys

import pytest
import tensorflow_datasets as tfds
from flaxzoo.data import (
    CausalLMData,
    DataError,
    TokenizerConfig,
    default_cache_dir,
    load_documents,
)
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.sources.load_documents import load_whole

TEXTS = [f"document number {i}\nwith a second line and é" for i in range(60)]


def load(name, cache, fraction=0.2):
    return [
        load_documents(name, split, validation_fraction=fraction, cache_dir=cache)
        for split in ("train", "validation")
    ]


def write(folder, texts):
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
    return f"text:{folder}/*.txt"


def test_splits_hold_every_document_once(tmp_path):
    train, validation = load(write(tmp_path / "a", TEXTS), tmp_path / "cache")
    assert sorted([*train, *validation]) == sorted(TEXTS)
    assert 4 <= len(validation) <= 20
    assert train[0] == next(iter(train))
    assert train[-1] == list(train)[-1]
    assert train[1:3] == list(train)[1:3]
    with pytest.raises(IndexError):
        train[len(train)]


def test_split_does_not_depend_on_names_and_order(tmp_path):
    first = load(write(tmp_path / "a", TEXTS), tmp_path / "1")
    second = load(write(tmp_path / "b", TEXTS[::-1]), tmp_path / "2")
    for one, other in zip(first, second, strict=True):
        assert list(one) == list(other)
        assert one.fingerprint == other.fingerprint
    more = load(write(tmp_path / "c", ["another", *TEXTS]), tmp_path / "1")
    assert set(first[0]) <= set(more[0])
    assert set(first[1]) <= set(more[1])


def test_joined_sources_are_divided_as_one(tmp_path):
    first = write(tmp_path / "a", TEXTS[:40])
    second = write(tmp_path / "b", TEXTS[40:])
    alone = write(tmp_path / "c", ["a single document"])
    whole = load(write(tmp_path / "d", TEXTS), tmp_path / "cache")
    for name in (f"{first} + {second}", f"{second}#sentences + {alone} + {first}"):
        train, validation = load(name, tmp_path / "cache")
        assert set(whole[0]) <= set(train)
        assert set(whole[1]) <= set(validation)
        assert len(train) + len(validation) == 60 + ("single" in " ".join([*train, *validation]))
        assert train.fingerprint not in (validation.fingerprint, whole[0].fingerprint)
        assert train[3] == list(train)[3]
        assert train[35:39] == list(train)[35:39]
    assert [part.lines_are_sentences for part in train.parts] == [True, False, False]
    assert len(load_whole(f"{alone} + {alone}", cache_dir=tmp_path / "cache")) == 2
    with pytest.raises(DataError, match="1 different text"):
        load(f"{alone} + {alone}", tmp_path / "cache")


def test_a_large_part_that_is_held_out_is_mentioned(tmp_path):
    name = write(tmp_path / "a", TEXTS[:2])
    _, validation = load(name, tmp_path / "cache", 0.05)
    assert validation.note.startswith("1 of 2 documents are held out, ")
    for part in (
        load(name, tmp_path / "cache", 0.2)[0],
        *load(write(tmp_path / "b", TEXTS), tmp_path),
    ):
        assert part.note == ""
    joined = load(f"{name} + {name}", tmp_path / "cache", 0.05)
    assert joined[1].note.startswith("2 of 4 ")


def test_parts_of_one_source(tmp_path):
    name = write(tmp_path / "a", TEXTS)
    blocks, sentences = (
        load_documents(name + unit, "train", validation_fraction=0.0, cache_dir=tmp_path / "cache")
        for unit in ("#block", "#sentences")
    )
    assert list(blocks) == list(sentences)
    assert blocks.parts == (blocks,)
    assert (blocks.lines_are_sentences, sentences.lines_are_sentences) == (False, True)
    assert blocks.fingerprint != sentences.fingerprint
    assert load_whole(name + "#block", cache_dir=tmp_path / "cache").fingerprint == (
        blocks.fingerprint
    )


def test_prepared_data_is_reused(tmp_path):
    name = write(tmp_path / "a", TEXTS)
    load(name, tmp_path / "cache")
    prepared = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    load(name, tmp_path / "cache")
    assert prepared == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    assert any("array_record" in path.name for path in prepared)
    assert not any(path.name.startswith(".") or "incomplete" in path.name for path in prepared)
    (tmp_path / "a/000.txt").write_text("changed")
    assert "changed" in [text for split in load(name, tmp_path / "cache") for text in split]


def test_duplicates_stay_together(tmp_path):
    train, validation = load(write(tmp_path / "a", ["same"] * 5 + ["other"]), tmp_path / "cache")
    assert sorted([*train, *validation]) == ["other"] + ["same"] * 5
    assert not set(train) & set(validation)


@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_no_split_is_empty(tmp_path, fraction):
    train, validation = load(write(tmp_path / "a", TEXTS[:5]), tmp_path / "cache", fraction)
    assert sorted(map(len, (train, validation))) == [1, 4]


def test_no_validation(tmp_path):
    name = write(tmp_path / "a", ["alone"])
    train = load_documents(name, "train", validation_fraction=0, cache_dir=tmp_path / "cache")
    assert list(train) == ["alone"]
    with pytest.raises(DataError, match=r"validation split.*validation_fraction"):
        load(name, tmp_path / "cache", 0)
    with pytest.raises(DataError, match=r"1 different text.*text:GLOB#block"):
        load(name, tmp_path / "cache", 0.1)
    with pytest.raises(UserError, match=r"validation_fraction .*got 1"):
        load(name, tmp_path / "cache", 1)


def test_an_error_leaves_no_files(tmp_path):
    name = write(tmp_path / "a", TEXTS)
    (tmp_path / "a/999.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        load(name, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot make .*file"):
        load(write(tmp_path / "a", TEXTS), tmp_path / "file")


def test_two_processes_prepare_the_same_data(tmp_path):
    code = (
        "import sys; from flaxzoo.data import load_documents;"
        "print(load_documents('builtin:python-docs', 'train', validation_fraction=0.1,"
        " cache_dir=sys.argv[1]).fingerprint)"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=60) for process in running]
    assert results[0] == results[1]  # and nothing but the fingerprint is printed
    assert results[0][1] == ""
    assert len(results[0][0].splitlines()) == 1
    assert len(list((tmp_path / "documents").iterdir())) == 1


def test_cache_dir_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FLAXZOO_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("FLAXZOO_CACHE")
    assert default_cache_dir().parts[-2:] == (".cache", "flaxzoo")


@pytest.fixture
def published(publish):
    """Publishes a data set of news, whose body is the text in capitals."""

    def write(**splits):
        rows = {
            name: [{"text": text, "label": 0, "body": text.upper()} for text in texts]
            for name, texts in splits.items()
        }
        features = {
            "text": tfds.features.Text(),
            "label": tfds.features.ClassLabel(num_classes=2),
            "body": tfds.features.Text(),
        }
        publish("tiny_news", features, **rows)

    return write


def test_published_validation_split_is_used(published, tmp_path):
    published(train=TEXTS[:9], validation=TEXTS[9:12], test=TEXTS[12:])
    train, validation = load("tfds:tiny_news", tmp_path / "cache", 0)
    assert (sorted(train), sorted(validation)) == (sorted(TEXTS[:9]), sorted(TEXTS[9:12]))
    shouted, _ = load("tfds:tiny_news#body", tmp_path / "cache", 0)
    assert sorted(shouted) == sorted(text.upper() for text in TEXTS[:9])
    assert len({train.fingerprint, validation.fingerprint, shouted.fingerprint}) == 3


def test_published_and_local_sources_join(published, tmp_path):
    published(train=TEXTS[:9], validation=TEXTS[9:12])
    name = f"tfds:tiny_news + {write(tmp_path / 'a', TEXTS[12:])}"
    train, validation = load(name, tmp_path / "cache")
    assert sorted([*train, *validation]) == sorted(TEXTS)
    assert list(train)[:9] == list(train.parts[0])
    whole = load_whole(name, cache_dir=tmp_path / "cache")
    assert sorted(whole) == sorted(TEXTS[9:])


def test_joined_sources_keep_the_notes_of_all(published, tmp_path):
    published(train=["a", "b", "c"])
    (tmp_path / "a.jsonl").write_text('{"text": "d", "n": 1}\n{"text": "e", "n": 2}\n')
    name = f"tfds:tiny_news#text?body!=A + jsonl:{tmp_path}/a.jsonl#text?n>1"
    joined = load_documents(name, "train", validation_fraction=0.0, cache_dir=tmp_path)
    assert sorted(joined) == ["b", "c", "e"]
    assert joined.note == (
        "1 document left out by the filter body!=A; 1 document left out by the filter n>1"
    )


def test_published_test_split_is_not_used(published, tmp_path):
    published(train=TEXTS[:30], test=TEXTS[30:])
    for _ in range(2):  # the second time from the cached division
        train, validation = load("tfds:tiny_news", tmp_path / "cache", 0.2)
        assert sorted([*train, *validation]) == sorted(TEXTS[:30])
        assert 1 <= len(validation) <= 15
        assert train.fingerprint != validation.fingerprint
    with pytest.raises(DataError, match="published validation"):
        load("tfds:tiny_news", tmp_path / "cache", 0)


def test_published_field_that_is_not_there(published, tmp_path):
    published(train=TEXTS[:3])
    with pytest.raises(DataError, match=r"body, text, .*'label'"):
        load("tfds:tiny_news#label", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tfds:ag_news_subst", "'ag_news_subst'.*ag_news_subset"),
        ("tfds:wiki40b/xx", "'wiki40b' .*'xx': .*en"),
    ],
)
def test_unknown_published_names_fail_at_once(monkeypatch, tmp_path, name, message):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(DataError, match=message) as caught:
        load(name, tmp_path)
    assert "\n" not in str(caught.value)


def test_no_network_fails_within_seconds(tmp_path):
    pytest.importorskip("importlib_resources", reason="TFDS needs it to download")
    code = (
        "import sys; from flaxzoo.data import load_documents, DataError\n"
        "try: load_documents('tfds:ag_news_subset#description', 'train',"
        " validation_fraction=0.1, cache_dir=sys.argv[1])\n"
        "except DataError as error: print(error)"
    )
    nowhere = "http://127.0.0.1:9"  # nothing listens there: as good as no network
    env = {**os.environ, "TFDS_DATA_DIR": str(tmp_path), "NO_PROXY": "", "no_proxy": ""}
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        env[name] = nowhere
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=env, capture_output=True, text=True, check=True, timeout=20,
    )  # fmt: skip
    assert re.search(r"cannot be downloaded \(\S+ does not answer\)", result.stdout)
    assert len(result.stdout.splitlines()) == 1


def test_the_log_of_a_run_mentions_a_large_part_that_is_held_out(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAXZOO_CACHE", str(tmp_path / "cache"))
    name = write(tmp_path / "a", ["one two three. " * 9, "four five six. " * 9])
    config = CausalLMData(
        source=name, length=8, tokenizer=TokenizerConfig("byte-bpe", 260), validation_fraction=0.05
    )
    (note,) = config.validation_split(config.make_tokenizer(), ()).notes
    assert note.startswith("1 of 2 documents are held out, ")
