"""Marian's two vocabularies, against transformers' own tokenizer of the same folder."""

import gzip
import json
import warnings

import pytest
from flaxzoo.data import DataError, SpecialIds, load_tokenizer
from flaxzoo.data.corpora.pair_corpus import build_pair_corpus
from flaxzoo.data.sources.parallel_corpus import open_parallel
from flaxzoo.data.tasks.translation import encode_source, start_and_end
from hypothesis import given, settings
from hypothesis import strategies as st

from ...support.marian_tokenizer import (
    SIDES,
    WORDS,
    WORTE,
    train_model,
    write_folder,
)
from ...support.nasty_texts import NASTY


@pytest.fixture(scope="module")
def texts():
    def sentences(words):
        return [" ".join(words[i % 12 : i % 12 + 1 + i % 5] + words[i % 7 :]) for i in range(99)]

    return [*sentences(WORDS), "naïve café 3.14!"], [*sentences(WORTE), "schön, größer?"]


@pytest.fixture(scope="module")
def models(texts):
    return [train_model(side, 60) for side in texts]


@pytest.fixture(scope="module", params=["shared", "separate"])
def folder(request, models, tmp_path_factory):
    work_folder = tmp_path_factory.mktemp("marian") / request.param
    return write_folder(work_folder, models, request.param == "separate")


@pytest.fixture(scope="module")
def ours(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return theirs_of(folder)


def theirs_of(folder):
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses", UserWarning)
        found = AutoTokenizer.from_pretrained(folder, tokenizer_type="marian")
    assert type(found).__name__ == "MarianTokenizer"
    return found


def check_equal(ours, theirs, side, texts):
    """Ids of texts, and texts of ids: of either side, but that theirs decodes only targets."""
    mine = {"source": ours, "target": ours.target}[side]
    batch = mine.encode_batch(texts)
    for text, ids in zip(texts, batch, strict=True):
        framed, offsets = mine.encode_with_offsets(text)
        argument = "text" if side == "source" else "text_target"
        assert framed == theirs(**{argument: text}, split_special_tokens=True).input_ids, text
        assert framed == [*mine.encode(text, add_special_tokens=False), mine.special_ids.eos]
        assert ids == framed[:-1]
        assert len(offsets) == len(framed)
        assert all(0 <= start <= end <= len(text) for start, end in offsets)
        if side == "source" and theirs.separate_vocabs:
            continue
        for row in (ids, [mine.special_ids.pad, *framed, 1, *ids, mine.special_ids.pad]):
            for skip in (True, False):
                assert mine.decode(row, skip) == theirs.decode(row, skip_special_tokens=skip)


@pytest.mark.parametrize("side", SIDES)
def test_equals_transformers_on_nasty_texts(ours, theirs, side, texts):
    check_equal(ours, theirs, side, [*NASTY, *texts[SIDES.index(side)]])
    codes = [">>fr<< a dog", ">>de<<a", ">>xx<< a", ">>fr<<", ">> << a", ">>", "a >>fr<<", ">><"]
    check_equal(ours, theirs, side, codes)


@settings(max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_equals_transformers_on_any_text(ours, theirs, text):
    for side in SIDES:
        check_equal(ours, theirs, side, [text])


@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True])
def test_equals_transformers_on_multi30k(datasets, tmp_path, separate):
    def lines(split, language):
        with gzip.open(
            datasets / f"mt/multi30k.{split}.{language}.gz", "rt", encoding="utf-8"
        ) as f:
            return f.read().removesuffix("\n").split("\n")

    models = [train_model(lines("train", name)[:4000], 2000) for name in ("en", "de")]
    folder = write_folder(tmp_path / "m", models, separate)
    ours, theirs = load_tokenizer(folder), theirs_of(folder)
    for side, language in zip(SIDES, ("en", "de"), strict=True):
        check_equal(ours, theirs, side, lines("val", language))


def test_sides_and_special_tokens(ours, theirs, folder):
    separate = folder.name == "separate"
    assert ours.kind == ours.target.kind == "marian"
    assert ours.target.target is ours.target
    sizes = len(theirs.encoder), len(theirs.decoder)
    assert (ours.vocab_size, ours.target.vocab_size) == sizes
    assert (sizes[0] != sizes[1]) == separate
    pad = theirs.pad_token_id
    assert ours.special_ids == SpecialIds(pad=pad, unk=1, bos=pad, eos=0)
    assert start_and_end(ours) == (pad, 0)
    assert encode_source(ours, "a dog") == theirs("a dog").input_ids
    assert ours.token(0) == "</s>"
    with pytest.raises(IndexError, match=str(sizes[0])):
        ours.token(sizes[0])
    with pytest.raises(DataError, match=r"'\\udcff'.* 1"):
        ours.encode("a\udcff")


def test_special_names_never_come_out_of_text(tmp_path):
    """Pieces that the model does not know stand as in the text, a run of them as one."""
    models = [train_model(["abc cab bca abc"] * 9, 12)] * 2
    tokenizer = load_tokenizer(write_folder(tmp_path / "m", models, False))
    assert "<unk>" in tokenizer._processor.encode("a<unk>", out_type=str)
    assert tokenizer.encode("a</s> a<pad> a<unk>").count(tokenizer.special_ids.eos) == 1
    assert tokenizer.special_ids.pad not in tokenizer.encode("a<pad>")


def test_special_tokens_of_the_target_are_its_own(models, tmp_path):
    folder = write_folder(tmp_path / "m", models, True)
    pieces = json.loads((folder / "target_vocab.json").read_text())
    moved = {piece: (id + 2) % len(pieces) for piece, id in pieces.items()}
    (folder / "target_vocab.json").write_text(json.dumps(moved))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_ids == SpecialIds(pad=2, unk=1, bos=2, eos=0)
    assert tokenizer.target.special_ids == SpecialIds(pad=4, unk=3, bos=4, eos=2)
    assert start_and_end(tokenizer) == (4, 2)
    assert encode_source(tokenizer, "a")[-1] == 0
    ids = tokenizer.target.encode("der kleine Hund")
    assert ids[-1] == 2
    assert tokenizer.target.decode([4, *ids]) == "der kleine Hund"


def test_pairs_are_tokenised_each_by_its_side(ours, tmp_path):
    (tmp_path / "p.tsv").write_text("a red dog\tein roter Hund\nthe house\tdas Haus?\n \tx\n")
    corpus = build_pair_corpus(open_parallel(f"tsv:{tmp_path}/p.tsv#1,2", "whole"), ours, tmp_path)
    assert [part.tolist() for part in corpus.pair(0)] == [
        ours.encode("a red dog"),
        ours.target.encode("ein roter Hund"),
    ]
    assert (len(corpus), corpus.vocab_size) == (2, max(ours.vocab_size, ours.target.vocab_size))
    sides = zip(
        (ours, ours.target), ("a red dog the house", "ein roter Hund das Haus?"), strict=True
    )
    unknown = sum(side.encode(text).count(1) for side, text in sides)
    assert corpus.num_unknown == unknown


def test_save_and_load(ours, folder, tmp_path):
    for tokenizer in (ours, ours.target):
        tokenizer.save(tmp_path / "t")
        assert sorted(p.name for p in (tmp_path / "t").iterdir()) == sorted(
            p.name for p in folder.iterdir()
        )
        loaded = load_tokenizer(tmp_path / "t")
        for one, other in ((loaded, ours), (loaded.target, ours.target)):
            assert one.fingerprint == other.fingerprint
            assert one.special_ids == other.special_ids
    assert ours.fingerprint != ours.target.fingerprint


def test_cleaned_up_spaces_and_named_specials(models, tmp_path):
    eos = {
        "__type": "AddedToken",
        "content": "</s>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
    }
    folder = write_folder(
        tmp_path / "m", models, False, clean_up_tokenization_spaces=True, eos_token=eos,
        additional_special_tokens=[">>de<<"],
    )  # fmt: skip
    ours, theirs = load_tokenizer(folder), theirs_of(folder)
    ids = ours.encode("schön , ja . 's")
    assert ours.decode([2, *ids]) == theirs.decode([2, *ids], skip_special_tokens=True)
    assert " ," not in ours.decode(ids)
    assert ours.decode([2, *ids], False) == theirs.decode([2, *ids])


def drop(name):
    return lambda folder: (folder / name).unlink()


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop("target.spm"), r"target\.spm"),
        (drop("vocab.json"), r"vocab\.json"),
        (drop("target_vocab.json"), r"target_vocab\.json"),
        (write("target.spm", b"nonsense"), r"target\.spm"),
        (write("vocab.json", b"{"), r"vocab\.json"),
        (write("vocab.json", b"[1]"), r"vocab\.json"),
        (write("vocab.json", b'{"a": "b"}'), r"vocab\.json.*'a'.*'b'"),
        (write("vocab.json", b'{"a": 1000000000}'), "'a'.*1000000000"),
        (write("vocab.json", b'{"a": 1, "b": 1}'), r"vocab\.json"),
        (write("added_tokens.json", b'{"<tool>": 900}'), "'<tool>'"),
        (write("tokenizer_config.json", b'{"eos_token": 3}'), "eos_token.*3"),
        (write("tokenizer_config.json", b'{"added_tokens_decoder": []}'), "added_tokens_decoder"),
        (write("tokenizer_config.json", b'{"image_token": "<image>"}'), "<image>"),
        (write("target_vocab.json", b'{"</s>": 0}'), r"target_vocab\.json.* <pad>"),
        (
            write("tokenizer_config.json", b'{"sp_model_kwargs": {"nbest_size": -1}}'),
            r"tokenizer_config\.json.*sp_model_kwargs.*nbest_size",
        ),
        (
            write("tokenizer_config.json", b'{"additional_special_tokens": ["<x>"]}'),
            r"vocab\.json.*<x>",
        ),
        (write("tokenizer_config.json", b'{"pad_token": "[P]"}'), r"\[P\]"),
        (write("special_tokens_map.json", b'{"eos_token": "[E]"}'), r"\[E\]"),
    ],
)
def test_broken_folders_are_named(models, tmp_path, spoil, message):
    folder = write_folder(tmp_path / "m", models, True)
    spoil(folder)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
