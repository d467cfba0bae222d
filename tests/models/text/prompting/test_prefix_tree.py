"""How requests are divided: each once, few tokens, and each token sees its own request alone."""

import random

from flaxzoo.models.decoding.padding import common_prefix
from flaxzoo.models.text.prompting.prefix_tree import Layout, Request, pack, plan


def requests_of(rows, labels=1):
    return [Request(tuple(row), (1,) * labels, number) for number, row in enumerate(rows)]


def seen(layout, index):
    """The ids that a token attends to."""
    return [id for j, id in enumerate(layout.ids) if j <= index <= layout.last[j]]


def test_each_token_attends_to_the_tokens_of_its_own_request():
    draw = random.Random(3)
    rows = [[draw.randrange(3) for _ in range(draw.randint(1, 7))] for _ in range(60)]
    requests = sorted(requests_of(rows))
    layout = Layout()
    layout.append(requests[:30])
    layout.append(requests[30:])
    assert len(layout.scored) == 60
    for index, _, request, _ in layout.scored:
        assert seen(layout, index) == rows[request]
        assert layout.positions[index] == len(rows[request]) - 1
    prefixes = {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
    assert len(prefixes) <= len(layout.ids) < sum(map(len, rows))


def planned(rows, capacity=64, labels=1):
    """The plan of some rows; every request stands in it once."""
    requests = requests_of(rows, labels)
    division = plan(requests, capacity)
    found = [r for item in division.items for r in item.requests]
    for group in division.groups:
        of_group = [r for item in group.items for r in item.requests]
        assert all(r.inputs[: len(group.prefix)] == group.prefix for r in of_group)
        assert all(r.first >= len(group.prefix) for r in of_group)
        found += of_group
    assert sorted(found) == sorted(requests)
    for item in division.items:
        layout = Layout()
        layout.append(item.requests)
        assert len(layout.ids) == item.size
    return division


def test_examples_that_all_queries_share_are_computed_once():
    examples = list(range(100, 300))
    rows = [[*examples, query, 5, choice] for query in range(50) for choice in range(4)]
    division = planned(rows, labels=2)
    assert [len(group.prefix) for group in division.groups] == [200]
    assert not division.items
    assert division.num_tokens < 200 + 50 * 6 + 50  # a query's choices share it


def test_each_subject_has_a_prefix_of_its_own_below_a_common_instruction():
    rows = [
        [*range(100, 140), 1000 + subject, *range(200, 300), query]
        for subject in range(3)
        for query in range(90)
    ]
    assert [len(group.prefix) for group in planned(rows).groups] == [141] * 3


def test_short_common_prefixes_are_not_shared():
    rows = [[7, number, *range(200, 250)] for number in range(20)]
    division = planned(rows)
    assert not division.groups
    assert {item.size for item in division.items} == {52}
    assert division.num_tokens == 20 * 52


def test_drawn_requests_are_divided_whole():
    draw = random.Random(5)
    for _ in range(20):
        common = [draw.randrange(4) for _ in range(draw.randint(0, 90))]
        rows = [
            common[: draw.randint(0, 99)] + [draw.randrange(3) for _ in range(draw.randint(1, 40))]
            for _ in range(draw.randint(1, 40))
        ]
        division = planned(rows, capacity=draw.randint(1, 99))
        assert division.num_tokens <= sum(map(len, rows))
    assert plan([], 9).num_tokens == 0


def test_a_long_chain_of_prefixes_needs_no_recursion():
    assert planned([[1] * n for n in range(1, 1500)], capacity=2000).num_tokens == 1499


def test_common_prefix():
    assert common_prefix((1, 2, 3), (1, 2, 4, 5)) == 2
    assert common_prefix((), (1,)) == 0
    assert common_prefix((1, 2), (1, 2, 3)) == 2
    assert common_prefix((9, 2), (1, 2)) == 0


def test_items_are_packed_into_few_bins():
    assert pack([(5,), (9,), (4,), (1,)], (10,)) == [[1, 3], [0, 2]]
    assert pack([(5, 1), (5, 9), (5, 9)], (10, 10)) == [[1, 0], [2]]
    assert pack([(5,), (9,), (4,)], (10,), 1) == [[1]]
    assert pack([(12,)], (10,)) == [[0]]
