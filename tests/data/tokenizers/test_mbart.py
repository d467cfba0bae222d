"""mBART's vocabularies against transformers' own reading of the same folder."""

import io
import json

import pytest
import sentencepiece
from flaxzoo.data import load_tokenizer
from flaxzoo.data.common.errors import DataError
from flaxzoo.data.tasks.translation import encode_source
from transformers import MBart50Tokenizer, MBartTokenizer

WORDS = "the quick brown fox jumps over lazy dog Ärger grün naïve 日本".split()
TEXTS = [
    " ".join(WORDS),
    "the quick  fox ",
    " Ärger ﬁne x",
    "日本 ½ Q",
    "",
    "one\ttwo\nthree",
    "unknown: Ω≈ç√ 😀",
]
KINDS = {"MBartTokenizer": MBartTokenizer, "MBart50Tokenizer": MBart50Tokenizer}


@pytest.fixture(scope="module")
def model():
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS[i % 5 :]) for i in range(80)]),
        model_writer=file,
        model_type="unigram",
        vocab_size=36,
        minloglevel=2,
    )
    return file.getvalue()


def folder(path, model, **settings):
    (path / "sentencepiece.bpe.model").write_bytes(model)
    (path / "config.json").write_text('{"model_type": "mbart"}')
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("language", ["en_XX", "de_DE"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_transformers(kind, language, model, tmp_path):
    place = folder(tmp_path, model, tokenizer_class=kind, src_lang=language)
    theirs, ours = KINDS[kind].from_pretrained(place, src_lang=language), load_tokenizer(place)
    code = theirs.convert_tokens_to_ids(language)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids.mask == theirs.mask_token_id
    for text, bare in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        ids = theirs(text).input_ids
        assert ours.encode(text) == encode_source(ours, text) == ids
        assert bare == theirs(text, add_special_tokens=False).input_ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    # fairseq's ids are one above those of sentencepiece, and the language stands at an end.
    piece = sentencepiece.SentencePieceProcessor(model_proto=model).piece_to_id("▁")
    assert ours.token(piece + 1) == "▁"
    marks = ((), (2, code)) if kind == "MBartTokenizer" else ((code,), (2,))
    assert ours.source_frame.single.marks == marks
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.encode(TEXTS[0]) == ours.encode(TEXTS[0])
    assert again.source_frame == ours.source_frame


def test_a_folder_without_settings_is_english(model, tmp_path):
    place = folder(tmp_path, model)
    ours = load_tokenizer(place)
    assert ours.token(ours.encode("the")[-1]) == "en_XX"
    (place / "tokenizer_config.json").write_text('{"src_lang": "de_XX"}')
    with pytest.raises(DataError, match=r"src_lang .*de_XX"):
        load_tokenizer(place)
