from itertools import islice

from flaxzoo.data import byte_pair_table, merge_byte_pairs

RHYME = """a sailor went to sea sea sea
to see what he could see see see
but all that he could see see see
was the bottom of the deep blue sea sea sea"""


def test_worked_example_of_the_lectures():
    (no_pair, start), (first, after_first), (second, after_second) = islice(
        merge_byte_pairs(RHYME), 3
    )
    assert no_pair is None
    assert start.most_common(5) == [("_", 33), ("e", 28), ("s", 15), ("a", 12), ("t", 11)]
    assert first == ("s", "e")
    assert after_first.most_common(3) == [("_", 33), ("e", 15), ("se", 13)]
    # The lectures' third line leaves out "_", which still leads with 33 - 12.
    assert second == ("e", "_")
    assert after_second.most_common(4) == [("_", 21), ("se", 13), ("a", 12), ("e_", 12)]


def test_table_shows_the_rounds():
    lines = byte_pair_table(RHYME, rounds=2, columns=4).splitlines()
    assert [line.split() for line in lines] == [
        ["0", "_", "33,", "e", "28,", "s", "15,", "a", "12"],
        ["1", "s", "e", "->", "se", "_", "33,", "e", "15,", "se", "13,", "a", "12"],
        ["2", "e", "_", "->", "e_", "_", "21,", "se", "13,", "a", "12,", "e_", "12"],
    ]


def test_merging_ends_with_whole_words():
    *_, (_, counts) = merge_byte_pairs("aaa aaa b")
    assert counts == {"aaa_": 2, "b_": 1}
    assert len(byte_pair_table("ab", rounds=99).splitlines()) == 3
