import numpy as np
import pytest
import tokenizers
from flaxzoo.data import DataError
from flaxzoo.data.features.bert_inputs import (
    BertInputs,
    Template,
    encode_texts,
    truncate_longest_first,
)
from flaxzoo.data.tokenizers.characters import CharacterTokenizer
from flaxzoo.data.tokenizers.frame import Frame
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from ...support import frames


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_truncation_equals_that_of_tokenizers(one, other, room):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.enable_truncation(room, strategy="longest_first")
    ids = backend.encode("a " * one, "b " * other).ids if room else []
    assert truncate_longest_first(one, other, room=room) == (ids.count(0), ids.count(1))


TEXT = st.lists(st.integers(5, 9), max_size=4)


@given(st.lists(st.lists(TEXT, min_size=1, max_size=2), min_size=1))
def test_special_tokens_are_added(examples):
    tokens = BertInputs.of(Template(frames.bert(2, 3), 0, 12), examples)
    assert len(tokens) == len(examples)
    for i, (one, *others) in enumerate(examples):
        row = tokens.example(i)
        second = [id for other in others for id in (*other, 3)]
        ids = [2, *one, 3, *second]
        padding = [0] * (12 - len(ids))
        assert row["input_ids"].tolist() == ids + padding
        assert row["attention_mask"].tolist() == [1] * len(ids) + padding
        types = [0] * (len(one) + 2) + [1] * len(second)
        assert row["token_type_ids"].tolist() == types + padding
        assert all(array.dtype == np.int32 for array in row.values())


def test_an_empty_frame_adds_nothing(tokenizer):
    assert Template.of(tokenizer, 8) == Template(frames.bert(2, 3), 0, 8)
    plain = CharacterTokenizer("abc")
    template = Template.of(plain, 5)
    assert template == Template(Frame(), 0, 5)
    texts = [("ab",), ("ab", "c"), ("abcabc",), ("abc", "abc"), ("", "c")]
    rows, num_truncated = encode_texts(texts, plain, template, ["here"] * 5)
    found = [rows.example(i) for i in range(5)]
    ids = [[2, 3], [2, 3, 4], [2, 3, 4, 2, 3], [2, 3, 2, 3, 4], [4]]
    assert [
        row["input_ids"][: len(one)].tolist() for row, one in zip(found, ids, strict=True)
    ] == ids
    assert [row["attention_mask"].sum() for row in found] == [len(one) for one in ids]
    assert rows.second.tolist() == [5, 2, 5, 2, 0]
    assert num_truncated == 2
    for empty in [("",), ("", "")]:
        with pytest.raises(DataError, match="line 3"):
            encode_texts([("a",), empty], plain, template, ["x.tsv line 2", "x.tsv line 3"])


def test_pairs_of_a_roberta_have_room_for_both_separators():
    template = Template(frames.roberta(0, 2), 1, 10)
    rows = BertInputs.of(template, [[[5, 6], [7]], [[5], []]])
    assert template.room(2) == 6
    assert rows.second.tolist() == [5, 4]
    assert rows.example(0)["input_ids"].tolist() == [0, 5, 6, 2, 2, 7, 2, 1, 1, 1]
    assert rows.example(1)["input_ids"].tolist() == [0, 5, 2, 2, 2, 1, 1, 1, 1, 1]
    assert not rows.example(0)["token_type_ids"].any()
    with pytest.raises(DataError, match="length 5"):
        Template(frames.roberta(0, 2), 1, 5).room(2)
