import numpy as np
import pytest
from flaxzoo.data import DataError
from flaxzoo.data.features.bert_inputs import BertInputs, Template, truncate_longest_first
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_longest_first_is_one_token_at_a_time(one, other, room):
    kept = truncate_longest_first(one, other, room)
    while one + other > room:
        one, other = (one - 1, other) if one > other else (one, other - 1)
    assert kept == (one, other)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(5, 9), max_size=4),
            st.none() | st.lists(st.integers(5, 9), max_size=4),
        ),
        min_size=1,
    )
)
def test_special_tokens_are_added(pairs):
    tokens = BertInputs.of(Template(2, 3, 0, 12), pairs)
    assert len(tokens) == len(pairs)
    for i, (one, other) in enumerate(pairs):
        row = tokens.example(i)
        second = [] if other is None else [*other, 3]
        ids = [2, *one, 3, *second]
        padding = [0] * (12 - len(ids))
        assert row["input_ids"].tolist() == ids + padding
        assert row["attention_mask"].tolist() == [1] * len(ids) + padding
        types = [0] * (len(one) + 2) + [1] * len(second)
        assert row["token_type_ids"].tolist() == types + padding
        assert all(array.dtype == np.int32 for array in row.values())


def test_a_template_needs_special_tokens(tokenizer, tmp_path):
    assert Template.of(tokenizer, 8) == Template(2, 3, 0, 8)
    from flaxzoo.data.tokenizers.base import SpecialIds
    from flaxzoo.data.tokenizers.characters import CharacterTokenizer

    plain = CharacterTokenizer("abc")
    plain.special_ids = SpecialIds()
    with pytest.raises(DataError, match=r"characters tokenizer has no \[CLS\] and \[SEP\]"):
        Template.of(plain, 8)
