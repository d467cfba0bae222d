"""The worked examples of sub-words in the lectures (002 'Tokenizer', 001, 004 slides 35 and 36)."""

import pytest
import tokenizers
from flaxzoo import data
from hypothesis import given
from hypothesis import strategies as st

RHYME = """a sailor went to sea sea sea
to see what he could see see see
but all that he could see see see
was the bottom of the deep blue sea sea sea"""


@pytest.fixture(scope="module")
def rounds():
    return list(data.merge_byte_pairs(RHYME))


def row(text):
    """Reads a printed row: tokens, each followed by its count; `a b 2` counts both twice."""
    counts, tokens = {}, []
    for word in text.split():
        if word.isdecimal():
            counts |= dict.fromkeys(tokens, int(word))
            tokens = []
        else:
            tokens.append(word)
    return counts


@pytest.mark.parametrize(
    ("merges", "pair", "printed", "total"),
    [
        (0, None, "_ 33 e 28 s 15 a 12 t 11 o 8 h l 6 u 4 b d w 3 c 2 f i m n p r 1", 140),
        (
            1,
            ("s", "e"),
            "_ 33 e 15 se 13 a 12 t 11 o 8 h l 6 u 4 b d w 3 c s 2 f i m n p r 1",
            127,
        ),
        (
            2,
            ("e", "_"),
            "_ 21 se 13 a e_ 12 t 11 o 8 h l 6 u 4 b d e w 3 c s 2 f i m n p r 1",
            115,
        ),
        # The lecture prints to_ as 1 and a second count for 18 tokens with 20 counts; the rhyme
        # has "to" twice.
        (
            50,
            ("blu", "e_"),
            "see_ 7 sea_ 6 could_ he_ the_ to_ 2 "
            "a_ all_ blue_ bottom_ but_ deep_ of_ sailor_ that_ was_ went_ what_ 1",
            33,
        ),
    ],
)
def test_the_rhymes_whole_tables(rounds, merges, pair, printed, total):
    assert rounds[merges].pair == pair
    assert rounds[merges].counts == row(printed)
    assert rounds[merges].counts.total() == total


def test_the_rhymes_fourth_table(rounds):
    printed = (
        "see_ sea_ e b l w a could_ hat_ he_ o t t_ the_ to_ u a_ d f m n p s sailor_ to"
    ).split()
    counts = rounds[23].counts
    assert len(printed) == 25
    # The lecture leaves out "_" and "e_". It prints 25 counts, 23 of which are right.
    assert counts.keys() == {*printed, "_", "e_"}
    assert (counts["see_"], counts["sea_"], counts["_"], counts["e_"]) == (7, 6, 5, 1)
    assert (counts["could_"], counts["sailor_"], counts.total()) == (2, 1, 60)


def test_the_rhymes_number_of_tokens(rounds):
    sizes = [len(round.counts) for round in rounds]
    assert sizes[:9] == [19, 20, 21, 22, 23, 23, 24, 25, 26]
    assert (len(sizes), max(sizes), sizes[-5:]) == (51, 29, [22, 21, 20, 19, 18])


def test_merging_ends_with_a_token_for_each_word(rounds):
    assert ["".join(word) for word in rounds[-1].words] == [f"{w}_" for w in RHYME.split()]
    assert all(len(word) == 1 for word in rounds[-1].words)
    *_, last = data.merge_byte_pairs("aaaa aaa")
    assert last.words == (("aaaa_",), ("aaa_",))
    assert [len(round.words[0]) for round in data.merge_byte_pairs("aaaa", "")] == [4, 2, 1]


def test_merged_tokens_stay_in_the_vocabulary():
    start, first, second, *_ = data.merge_byte_pairs("man plan commands", end_of_word="")
    assert start.vocabulary == tuple("manplcods")
    assert (first.pair, second.pair) == (("a", "n"), ("m", "an"))
    assert first.words[:2] == (("m", "an"), ("p", "l", "an"))
    assert second.words == (("man",), ("p", "l", "an"), ("c", "o", "m", "man", "d", "s"))
    assert second.vocabulary == (*"manplcods", "an", "man")
    assert second.counts["an"] == 1  # of plan; all others have become a part of man


@pytest.mark.parametrize(
    ("word", "divided"),
    [("man", "man"), ("plan", "p l an"), ("commands", "c o m man d s"), ("", "")],
)
def test_fewest_pieces_of_the_slide(word, divided):
    pieces = {*"abcdefghijklmnopqrstuvwxyz", "an", "man"}
    assert data.fewest_pieces(word, pieces) == divided.split()


def test_the_longest_pieces_first_are_not_always_the_fewest():
    longest_first = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(
            {"abc": 0, "d": 1, "e": 2, "ab": 3, "cde": 4, "[UNK]": 5}, continuing_subword_prefix=""
        )
    )
    assert longest_first.encode("abcde").tokens == ["abc", "d", "e"]
    assert data.fewest_pieces("abcde", ["abc", "d", "e", "ab", "cde"]) == ["ab", "cde"]
    # Of two divisions into two pieces, the one whose last piece is longer.
    assert data.fewest_pieces("abcd", [*"abcd", "ab", "cd", "bcd"]) == ["a", "bcd"]


@given(
    text=st.text("abc", max_size=12),
    longer=st.sets(st.text("abc", min_size=2, max_size=5), max_size=8),
)
def test_fewest_pieces_are_those_of_equally_likely_unigrams(text, longer):
    pieces = ["a", "b", "c", *sorted(longer)]
    unigrams = tokenizers.models.Unigram([("?", -99.0), *((p, -1.0) for p in pieces)], 0)
    divided = data.fewest_pieces(text, pieces)
    assert "".join(divided) == text
    assert len(divided) == len(tokenizers.Tokenizer(unigrams).encode(text).ids)


def test_a_text_that_the_pieces_cannot_make_up_is_refused():
    with pytest.raises(data.DataError, match=r"'comma'.*'com'.*'m'"):
        data.fewest_pieces("comma", {"com", "an"})


def test_the_notes_sentence_has_the_printed_ids(tmp_path):
    """001: byte pairs whose ends of words are `_`; only the seven pieces have printed ids."""
    printed = {"the_": 12, "cat_": 536, "sat_": 1326, "on_": 15, "m": 8, "at_": 28}
    merges = [("h", "e_"), ("t", "he_"), ("a", "t_"), ("c", "at_"), ("s", "at_"), ("o", "n_")]
    unprinted = sorted({piece for pair in merges for piece in (*pair, "".join(pair))} - {*printed})
    vocabulary = printed | {piece: 2000 + i for i, piece in enumerate(unprinted)}
    model = tokenizers.models.BPE(vocabulary, merges, end_of_word_suffix="_")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = data.load_tokenizer(tmp_path)
    assert tokenizer.encode("The cat sat on the mat") == [12, 536, 1326, 15, 12, 8, 28]
    pieces = [tokenizer.token(i) for i in (12, 536, 1326, 15, 12, 8, 28)]
    assert pieces == data.fewest_pieces("the_cat_sat_on_the_mat_", printed)
