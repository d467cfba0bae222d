import numpy as np
import pytest
from flaxzoo.data import DataError, TokenizerConfig, load_tokenizer, train_tokenizer
from flaxzoo.data.features.masking import Masking, WordBoundaries, word_boundaries
from flaxzoo.data.tokenizers.huggingface import HuggingFaceTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

CLS, SEP, MASK = 2, 3, 4
SPECIALS = (0, 1, CLS, SEP, MASK)
VOCAB = 50
CONTINUES = np.arange(VOCAB) >= 30
BREAKS = np.arange(VOCAB) % 10 == 9
WORDS = WordBoundaries(CONTINUES, BREAKS)

# A row: [CLS] tokens [SEP] tokens [SEP], in which a token may be [UNK] or go on with a word.
segment = st.lists(st.integers(1, VOCAB - 1).filter(lambda id: id not in (2, 3, 4)), max_size=30)
rows = st.tuples(segment, segment).map(lambda ab: [CLS, *ab[0], SEP, *ab[1], SEP])


def masking(max_predictions, rate=0.15, whole_word=False):
    return Masking(MASK, SPECIALS, VOCAB, max_predictions, rate, WORDS if whole_word else None)


def mask(ids, rule, seed=0):
    """Masks a row; returns what became of it and its predictions without the unused ones."""
    ids = np.asarray(ids, np.int32)
    row = rule.mask_row(ids, np.random.default_rng(seed))
    assert all(a.shape == (rule.max_predictions,) for a in row.values())
    assert all(a.dtype == np.int32 for a in row.values())
    count = int(row["masked_weights"].sum())
    assert row["masked_weights"].tolist() == [1] * count + [0] * (rule.max_predictions - count)
    assert not row["masked_positions"][count:].any()
    assert not row["masked_labels"][count:].any()
    return ids, row["masked_positions"][:count], row["masked_labels"][:count]


@given(
    row=rows,
    max_predictions=st.integers(1, 20),
    rate=st.floats(0.01, 0.99),
    whole_word=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_properties_of_masking(row, max_predictions, rate, whole_word, seed):
    rule = masking(max_predictions, rate, whole_word)
    before = np.asarray(row)
    after, positions, labels = mask(row, rule, seed)
    ordinary = ~np.isin(before, SPECIALS)
    assert (np.diff(positions) > 0).all()
    assert (labels == before[positions]).all()
    assert ordinary[positions].all()
    untouched = np.delete(np.arange(len(row)), positions)
    assert (after[untouched] == before[untouched]).all()
    assert not np.isin(after[positions], [0, 1, CLS, SEP]).any()
    budget = min(max_predictions, max(1, round(len(row) * rate)))
    if not whole_word:
        assert len(positions) == min(budget, ordinary.sum())
        return
    joined = CONTINUES[before] & ~BREAKS[np.roll(before, 1)]
    words = np.cumsum(~(joined & ordinary & np.roll(ordinary, 1)))
    chosen = set(words[positions].tolist())
    assert sorted(positions.tolist()) == np.flatnonzero(np.isin(words, list(chosen))).tolist()
    sizes = np.bincount(words[ordinary], minlength=1)
    smallest = sizes[sizes > 0].min() if ordinary.any() else 0
    if smallest > budget:  # a row has a prediction all the same, if it has room for it
        assert len(positions) == (smallest if smallest <= max_predictions else 0)
    else:
        assert len(positions) <= budget
        assert (len(positions) > 0) == ordinary.any()
        left = sizes[[w for w in np.unique(words[ordinary]) if w not in chosen]]
        assert (left > budget - len(positions)).all()


def test_ids_that_the_vocabulary_leaves_out_are_not_drawn():
    rule = Masking(MASK, SPECIALS, VOCAB, 40, 0.99, None, tuple(range(7, VOCAB)))
    drawn = set()
    for seed in range(50):
        after, _, _ = mask([CLS, *[6] * 40, SEP], rule, seed)
        drawn |= set(after[1:-1].tolist())
    assert drawn == {5, 6, MASK}


@pytest.mark.parametrize("options", [{}, {"whole_word": True}, {"ngrams": 3}])
def test_special_tokens_without_a_role_are_neither_drawn_nor_masked(prose, options):
    trained = train_tokenizer(prose, TokenizerConfig("wordpiece", 400))
    assert isinstance(trained, HuggingFaceTokenizer)
    backend = trained.backend()
    # One is a new id, and the other is a piece that the vocabulary already has.
    backend.add_special_tokens(["<entity>", "the"])
    tokenizer = HuggingFaceTokenizer(backend, trained.special_ids)
    added = {backend.token_to_id(name) for name in ("<entity>", "the")}
    assert tokenizer.all_special_ids == {*range(5), *added}
    rule = Masking.of(tokenizer, 400, rate=0.9, **options)
    drawn = set()
    for seed in range(100):
        after, positions, _ = mask([CLS, *added, *range(5, tokenizer.vocab_size), SEP], rule, seed)
        assert not {1, 2} & set(positions)
        drawn |= set(after[positions])
    assert drawn == set(range(4, tokenizer.vocab_size)) - added


def within(share, expected, count, deviations=5.0):
    return abs(share - expected) < deviations * np.sqrt(expected * (1 - expected) / count)


@pytest.mark.parametrize("whole_word", [False, True])
def test_the_three_rates(whole_word):
    rng = np.random.default_rng(0)
    rule = masking(20, whole_word=whole_word)
    fates = np.zeros(3)
    tokens = 0
    where = np.zeros(128)
    replaced = np.zeros(VOCAB)
    for seed in range(4000):
        row = rng.integers(5, VOCAB, 128, dtype=np.int32)
        row[[0, 60, 127]] = CLS, SEP, SEP
        after, positions, labels = mask(row, rule, seed)
        tokens += len(row)
        masked, same = after[positions] == MASK, after[positions] == labels
        fates += [masked.sum(), (~masked & ~same).sum(), same.sum()]
        where[positions] += 1
        np.add.at(replaced, after[positions][~masked & ~same], 1)
    count = fates.sum()
    if whole_word:  # a word that does not fit leaves some of the budget
        assert 0.14 < count / tokens <= 19 / 128
    else:
        assert count / tokens == 19 / 128  # of 128 tokens, 15 % rounded
    chance = 1 / (VOCAB - len(SPECIALS))  # that a random token is the old one
    for share, expected in zip(
        fates / count, (0.8, 0.1 - 0.1 * chance, 0.1 + 0.1 * chance), strict=True
    ):
        assert within(share, expected, count)
    assert not replaced[list(SPECIALS)].any()
    assert (replaced[5:] > 0).all()
    if not whole_word:  # no place is favoured
        share = count / 4000 / 125
        assert all(
            within(n / 4000, share, 4000) for i, n in enumerate(where) if i not in (0, 60, 127)
        )


def test_number_of_predictions(datasets):
    bert = load_tokenizer(datasets / "tok" / "bert_base_uncased_vocab.txt")
    assert Masking.of(bert, 128).max_predictions == 20
    assert Masking.of(bert, 512).max_predictions == 77
    assert Masking.of(bert, 100).max_predictions == 15
    assert Masking.of(bert, 512, max_predictions=80).max_predictions == 80
    assert Masking.of(bert, 128).specials == (0, 100, 101, 102, 103)


@pytest.mark.parametrize("whole_word", [False, True])
def test_a_row_of_specials_predicts_nothing(whole_word):
    ids, positions, _ = mask([CLS, 1, SEP, SEP], masking(3, whole_word=whole_word))
    assert ids.tolist() == [CLS, 1, SEP, SEP]
    assert not len(positions)


def test_spans_of_tokens():
    """Three masked tokens of a long row, in spans of n of them with p(n) = 6 / (11 n)."""
    rule = Masking(MASK, SPECIALS, VOCAB, 3, 0.5, ngrams=3)
    neighbors = np.zeros(3)
    for seed in range(600):
        _, positions, _ = mask([CLS, *[10] * 2000, SEP], rule, seed)
        neighbors[(np.diff(positions) == 1).sum()] += 1
    # Three spans; a span of two and one of one in either order; a span of three.
    for found, expected in zip(neighbors, (36 / 121, 63 / 121, 2 / 11), strict=True):
        assert within(found / 600, expected, 600)
    # A span does not cross a special token.
    rule = Masking(MASK, SPECIALS, VOCAB, 2, 0.3, ngrams=3)
    for seed in range(20):
        _, positions, _ = mask([CLS, 10, SEP, 11, SEP, 12, SEP], rule, seed)
        assert set(positions) <= {1, 3, 5}


def words_of(tokenizer, text):
    """Returns the words that are masked together, without the white space around them."""
    ids = np.asarray(tokenizer.encode(text, add_special_tokens=False))
    starts = np.flatnonzero(~word_boundaries(tokenizer).joined(ids))
    words = [tokenizer.decode(part.tolist()) for part in np.split(ids, starts)]
    return [word.strip() for word in words if word.strip()]


LINES = "the unparalleled zebra\nfirst word  of\n\n\n a line\tthen tabs\r\nend\n"


@pytest.mark.parametrize(
    ("kind", "size"),
    [("wordpiece", 400), ("byte-bpe", 300), ("sentencepiece-bpe", 400), ("words", 400)],
)
def test_words_are_those_of_a_reader(prose, kind, size):
    tokenizer = train_tokenizer([*prose, *[LINES] * 9], TokenizerConfig(kind, size))
    assert words_of(tokenizer, LINES) == LINES.split()


def test_words_of_gpt2_are_those_of_a_reader(datasets):
    gpt2 = load_tokenizer(datasets / "tok" / "gpt2_encoder.json")
    assert words_of(gpt2, LINES) == LINES.split()
    # Punctuation continues a word, as in RoBERTa.
    assert words_of(gpt2, "well,\nthen") == ["well,", "then"]


def test_a_line_break_ends_a_masked_word(datasets):
    gpt2 = load_tokenizer(datasets / "tok" / "gpt2_encoder.json")
    ids = gpt2.encode("unparalleled\nunparalleled")
    rule = Masking(0, (0,), gpt2.vocab_size, len(ids), 0.5, word_boundaries(gpt2))
    half = len(ids) // 2
    assert gpt2.token(ids[half]) == "Ċ"
    found = {tuple(mask(ids, rule, seed)[1].tolist()) for seed in range(30)}
    assert found >= {tuple(range(half)), tuple(range(half + 1, len(ids)))}
    assert all(set(x) & set(range(half)) in (set(), set(range(half))) for x in found)


def test_words_of_wordpiece(prose):
    wordpiece = train_tokenizer(prose, TokenizerConfig("wordpiece", 400))
    ids = np.asarray(wordpiece.encode("the unparalleled", add_special_tokens=False))
    joined = word_boundaries(wordpiece).joined(ids).tolist()
    assert [wordpiece.token(id).startswith("##") for id in ids] == joined
    assert any(joined)
    assert not word_boundaries(wordpiece).continues[list(range(5))].any()


def test_vocabularies_that_cannot_be_masked(prose):
    characters = train_tokenizer(["abc"], TokenizerConfig("characters"))
    with pytest.raises(DataError, match=r"characters .*mask"):
        Masking.of(characters, 128)
    with pytest.raises(DataError, match="whole_word"):
        word_boundaries(characters)
