"""Few-shot prompts: order, choice by seed, balance, tasks, and a context that is full."""

from collections import Counter

import pytest
from flaxzoo import data
from hypothesis import given
from hypothesis import strategies as st

PATTERN = data.PromptPattern("{text} -> {label}\n")


def examples(labels, task=None):
    return [
        data.PromptExample({"text": f"{task or 'text'} {i}", "label": label}, task)
        for i, label in enumerate(labels)
    ]


POOL = examples("aabbbc" * 4)


SEEDS = st.none() | st.integers(0, 5)


@given(st.integers(0, 20), SEEDS, st.booleans())
def test_the_same_seed_makes_the_same_prompt_and_more_shots_include_fewer(number, seed, balanced):
    query = {"text": "new"}
    one, other = (data.FewShot(PATTERN, POOL, number, seed, balanced) for _ in range(2))
    assert one.prompt(query) == other.prompt(query)
    parts = one.parts(query)
    assert len(parts) == number + 1
    assert parts[-1] == "new ->"
    more = data.FewShot(PATTERN, POOL, number + 1, seed, balanced).parts(query)
    if seed is None:
        assert not Counter(parts) - Counter(more)
    else:
        assert more[1:] == parts


@given(st.integers(0, 24), SEEDS)
def test_balanced_answers_differ_by_at_most_one_while_there_are_enough(number, seed):
    shots = data.FewShot(PATTERN, POOL, number, seed, balanced=True).shots({"text": "new"})
    counts = Counter(shot.fields["label"] for shot in shots)
    most = max(counts.values(), default=0)
    for label, there in Counter("aabbbc" * 4).items():
        assert counts[label] >= min(most - 1, there)


def test_without_a_seed_the_first_examples_are_shown_in_their_order():
    for number in (0, 1, 3, 8):
        assert data.FewShot(PATTERN, POOL, number).shots({"text": "new"}) == POOL[:number]
    assert data.FewShot(PATTERN, POOL, 2).shots(POOL[1]) == [POOL[0], POOL[2]]
    sorted_by_label = examples("aaaabbbbc")
    chosen = data.FewShot(PATTERN, sorted_by_label, 4, balanced=True).shots({"text": "new"})
    assert chosen == [sorted_by_label[i] for i in (0, 1, 4, 8)]


def test_other_seeds_choose_others():
    prompts = {data.FewShot(PATTERN, POOL, 3, seed).prompt({"text": "new"}) for seed in range(9)}
    assert len(prompts) == 9


def test_the_query_is_never_among_the_examples():
    for example in POOL:
        shots = data.FewShot(PATTERN, POOL, 23, 1).shots(example)
        assert example not in shots
        assert len(shots) == 23
    with pytest.raises(data.UserError, match=r"shots must .*23.*got 24"):
        data.FewShot(PATTERN, POOL, 24, 1).shots(POOL[0])


def test_shots_differ_from_the_query_and_from_each_other():
    spaced = data.PromptExample({"text": " text 3 ", "label": "b"})
    shots = data.FewShot(PATTERN, [*POOL, spaced, *POOL], 23).shots(POOL[3])
    assert len({shot.fields["text"].strip() for shot in shots}) == 23
    assert "text 3" not in {shot.fields["text"].strip() for shot in shots}
    only = data.PromptPattern("Label: {label}\n")
    assert data.FewShot(only, examples("abc"), 2).parts({"label": "a"})[:2] in (
        ["Label: b\n", "Label: c\n"],
        ["Label: c\n", "Label: b\n"],
    )


def test_examples_are_of_the_querys_task():
    pool = [*examples("ab", "first"), *examples("abc", "second")]
    few = data.FewShot(PATTERN, pool, 2)
    query = data.PromptExample({"text": "new"}, "second")
    assert {shot.task for shot in few.shots(query)} == {"second"}
    with pytest.raises(data.UserError, match=r"shots must .*0.*'third'.*got 2"):
        few.shots({"text": "new", "task": "third"})


def test_a_full_context_loses_its_first_examples():
    few = data.FewShot(PATTERN, POOL, 5)
    query = {"text": "new"}
    whole = few.prompt(query)
    for limit in (len(whole), len(whole) - 1, 20, 6):
        prompt = few.fitting(query, len, limit)
        assert len(prompt) <= limit
        assert whole.endswith(prompt)
    assert few.fitting(query, len, len(whole)) == whole
    assert few.fitting(query, len, 6) == "new ->"
    with pytest.raises(data.UserError, match=r"5 tokens.* 6"):
        few.fitting(query, len, 5)
    with pytest.raises(data.UserError, match=r"5 examples"):
        few.fitting(query, len, len(whole) - 1, drop=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PATTERN, POOL[:2], 3), "shots must .* 2,.* got 3"),
        ((PATTERN, POOL, -1), "num_shots must .*-1"),
        ((PATTERN, [data.PromptExample({"text": "a"})], 1), "'label'.*example 1 of 1"),
    ],
)
def test_too_few_examples_or_fields_are_refused(arguments, message):
    with pytest.raises(data.UserError, match=message):
        data.FewShot(*arguments)
