import numpy as np
from flaxzoo.data.features.packed_texts import PackedTexts
from hypothesis import given, settings
from hypothesis import strategies as st

from ...support import frames
from .test_segment_pairs import CLS, SEP, FakeCorpus, documents, lengths


@given(sizes=documents, length=lengths, seed=st.integers(0, 99))
@settings(deadline=None)
def test_rows_are_full_of_whole_or_cut_documents(sizes, length, seed):
    corpus = FakeCorpus(None, 0, "", 0, tuple(map(tuple, sizes)))
    packed = PackedTexts(corpus, length, frames.bert(CLS, SEP))
    example = packed.example(0, 0, np.random.default_rng(seed))
    ids, segments = example.input_ids, example.segment_ids
    # Only a row that ends with texts of one token may have padding, less than a text needs.
    assert length - 2 <= len(ids) <= length
    assert segments[0] == 1
    documents_at = np.searchsorted(corpus.sentence_starts[corpus.document_starts], ids, "right")
    read = []
    for number in range(1, segments[-1] + 1):
        text = ids[segments == number]
        assert (text[0], text[-1]) == (CLS, SEP)
        assert (np.diff(text[1:-1]) == 1).all()
        assert len(set(documents_at[segments == number][1:-1])) == 1
        read += text[1:-1].tolist()
    # The texts of a row follow each other, and the first follows the last of the corpus.
    assert set(np.diff(read)) <= {1, 1 - len(corpus.tokens)}
    assert packed.num_examples == max(1, len(corpus.tokens) // (length - 2))
