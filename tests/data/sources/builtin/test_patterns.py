import contextlib
import pickle
import re
from collections import Counter

import numpy as np
import pytest
from flaxzoo import data
from flaxzoo.data.sources.builtin import patterns as source
from flaxzoo.data.sources.builtin.patterns import KINDS, Patterns, PatternTask
from flaxzoo.data.tasks.causal_lm import PatternExamples

ALL = Patterns.parse("builtin:patterns")


@pytest.mark.parametrize(
    ("kind", "key", "query", "answer"),
    [
        ("map", "cgbfa", "ba", "gc"),
        ("copy", "ge", "bad", "badge"),
        ("reverse", "ge", "bad", "dabge"),
        ("count", "d2571", "dad", "7"),
        ("count", "d2571", "abc", "2"),
        ("arithmetic", "481529706", "3+4", "0"),
    ],
)
def test_each_kind_of_task_has_its_answer(kind, key, query, answer):
    task = PatternTask(kind, key)
    assert query in task.queries
    assert task.answer(query) == answer


@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_follow_from_the_key_alone(kind):
    """Reads the lines of documents again, and solves them without the code of the source."""
    patterns = Patterns.parse(f"builtin:patterns#{kind}")
    for index in range(20):
        episode = patterns.training_episode(5, 1, index, 40)
        lines = episode.text.splitlines()
        assert len(lines) == len(episode.examples) == 40
        key = episode.task.key
        for line in lines:
            match = re.fullmatch(r"(\S+) > (\w+)", line)
            assert match is not None
            query, answer = match.groups()
            if kind == "map":
                expected = "".join(key["abcde".index(letter)] for letter in query)
            elif kind == "count":
                expected = key[1:][Counter(query)[key[0]]]
            elif kind == "arithmetic":
                expected = key[int(query[0]) + int(query[2])]
            else:
                expected = "".join(reversed(query) if kind == "reverse" else query) + key
            assert answer == expected, line


def test_an_episode_is_a_function_of_its_arguments():
    episode = ALL.training_episode(1, 2, 3, 10)
    assert episode == Patterns.parse("builtin:patterns").training_episode(1, 2, 3, 10)
    others = [ALL.training_episode(*seed, 10) for seed in ((0, 2, 3), (1, 0, 3), (1, 2, 0))]
    assert episode not in others
    longer = ALL.training_episode(1, 2, 3, 30)
    assert longer.task == episode.task
    assert longer.examples[:10] == episode.examples
    assert episode.text == (
        "ba > gd\nbc > gc\ncb > cg\nca > cd\ncd > ch\nea > ed\nbe > ge\ndb > hg\ndd > hh\nda > hd\n"
    ), "the same on every machine, and in every version"


def test_all_kinds_are_equally_frequent_and_can_be_chosen():
    drawn = [ALL.training_episode(0, 0, index, 1).task for index in range(1000)]
    counts = Counter(task.kind for task in drawn)
    assert sorted(counts) == sorted(KINDS)
    assert all(150 < count < 250 for count in counts.values()), counts
    some = Patterns.parse("builtin:patterns#count,map,count")
    assert some.kinds == ("count", "map")
    kinds = {some.training_episode(0, 0, index, 1).task.kind for index in range(50)}
    assert kinds == {"count", "map"}


def test_no_held_out_task_is_ever_drawn_in_training():
    """Of endings there are few enough that a leak would be seen: 64 for either kind."""
    held_out = {episode.task.name for episode in ALL.held_out}
    assert len(held_out) > source.NUM_HELD_OUT / 2
    assert all(episode.task.held_out for episode in ALL.held_out)
    drawn = {ALL.training_episode(seed, 0, i, 1).task.name for seed in (0, 1) for i in range(2000)}
    assert not drawn & held_out
    endings = {name for name in drawn | held_out if name.startswith(("copy", "reverse"))}
    assert len(endings) > 120, "nearly all tasks of these kinds have been drawn"
    asymmetric = (re.match(r"(a(.)(?!a).) > \1(..)\n", text, re.M) for text in ALL.documents())
    copied = {found[3] for found in asymmetric if found}
    assert len(copied) > 10
    assert not {f"copy:{ending}" for ending in copied} & held_out


def test_a_tenth_of_the_tasks_is_held_out():
    rng = np.random.default_rng(0)
    keys = {"".join(rng.permutation(list(source.LETTERS))[:5]) for _ in range(4000)}
    fraction = np.mean([PatternTask("map", key).held_out for key in keys])
    assert 0.08 < fraction < 0.12


def test_no_query_of_a_held_out_episode_occurs_twice():
    for episode in ALL.held_out:
        queries = [query for query, _ in episode.examples]
        assert len(set(queries)) == len(queries) == source.DOCUMENT_EXAMPLES
    sums = Patterns.parse("builtin:patterns#arithmetic").training_episode(0, 0, 0, 60)
    queries = [query for query, _ in sums.examples]
    assert set(queries[25:50]) == set(queries[:25]), "after all 25 sums they repeat"
    assert queries[25:50] != queries[:25]


def test_documents_are_training_episodes():
    documents = list(data.read_documents(data.parse_source("builtin:patterns#map")))
    assert len(set(documents)) == len(documents) == source.NUM_DOCUMENTS
    assert all(text.count("\n") == source.DOCUMENT_EXAMPLES for text in documents[:10])
    for text in documents[:300]:
        pairs = (line.split(" > ") for line in text.splitlines())
        table = {a: b for query, answer in pairs for a, b in zip(query, answer, strict=True)}
        if len(table) == len(source.MAPPED):
            key = "".join(table[letter] for letter in source.MAPPED)
            assert not PatternTask("map", key).held_out


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAXZOO_CACHE", str(tmp_path_factory.mktemp("cache")))
        tokenizer = data.TokenizerConfig(kind="characters")
        config = data.CausalLMData(source="builtin:patterns", length=96, tokenizer=tokenizer)
        yield config, config.make_tokenizer()


def test_every_sequence_is_one_episode_that_begins_with_its_first_example(settings):
    config, tokenizer = settings
    split = config.train_split(tokenizer, (), 3)
    assert isinstance(split.examples, PatternExamples)
    assert "endless" in split.summary
    for index in range(20):
        arrays = split.examples.example(1, index)
        assert {name: array.shape for name, array in arrays.items()} == dict.fromkeys(arrays, (96,))
        real = arrays["segment_ids"] == 1
        assert (arrays["segment_ids"][~real] == 0).all(), "one document in each sequence"
        assert real.sum() > 96 - len("abc > abcde\n")
        text = tokenizer.decode(arrays["input_ids"][real].tolist())
        whole = ALL.training_episode(3, 1, index, 40).text
        assert whole.startswith(text)
        assert text.endswith("\n"), "examples are whole"
        assert arrays["input_ids"][0] == tokenizer.special_ids.bos
        assert arrays["labels"][real][-1] == tokenizer.special_ids.eos
        again = split.examples.example(1, index)
        assert all((arrays[name] == again[name]).all() for name in arrays)


def test_validation_and_evaluation_read_held_out_episodes(settings):
    config, tokenizer = settings
    for split in (
        config.validation_split(tokenizer, ()),
        config.whole_source("builtin:patterns", tokenizer, ()),
    ):
        assert split.examples.num_examples == source.NUM_HELD_OUT
        texts = set()
        for index in range(split.examples.num_examples):
            arrays = split.examples.example(0, index)
            assert arrays["segment_ids"].max() == 1
            texts.add(tokenizer.decode(arrays["input_ids"].tolist()).strip("\0"))
        held_out = [ALL.held_out_episode(index, 40).text for index in range(source.NUM_HELD_OUT)]
        assert all(any(whole.startswith(text) for whole in held_out) for text in texts)
        assert split.content.num_bytes == sum(map(len, texts)) or len(texts) < source.NUM_HELD_OUT


def test_batches_resume_where_they_stopped_and_are_the_same_in_worker_processes(settings):
    config, tokenizer = settings
    examples = config.train_split(tokenizer, (), 0).examples
    run = {"batch_size": 4, "seed": 0, "num_steps": 3}
    with contextlib.closing(data.train_iterator(examples, **run)) as batches:
        next(batches)
        state, expected = batches.get_state(), next(batches)
    copied = pickle.loads(pickle.dumps(examples))  # as for a worker process
    with contextlib.closing(data.train_iterator(copied, **run)) as resumed:
        resumed.set_state(state)
        assert (next(resumed)["input_ids"] == expected["input_ids"]).all()


def test_a_sequence_that_is_too_short_is_refused(settings):
    config, tokenizer = settings
    short = data.CausalLMData(source="builtin:patterns", length=12, tokenizer=config.tokenizer)
    with pytest.raises(data.DataError, match=r"two examples .*data.length"):
        short.train_split(tokenizer, (), 0)
