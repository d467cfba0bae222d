import json
import pickle
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from flaxzoo.data import (
    CausalLMEvaluationExamples,
    CausalLMExamples,
    DataError,
    TokenizerConfig,
    TrainBatches,
    build_corpus,
    evaluation_batches,
    load_documents,
    open_corpus,
    train_iterator,
    train_tokenizer,
)

RUN = {"batch_size": 4, "seed": 7, "num_steps": 12}


@dataclass(frozen=True)
class Numbers:
    """Rows that say which they are; 0 is padding."""

    num_examples: int

    def example(self, epoch, index):
        return {"id": np.array([1 + epoch * self.num_examples + index])}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    documents = load_documents(
        "builtin:python-docs", "validation", validation_fraction=0.1, cache_dir=folder
    )
    tokenizer = train_tokenizer(documents, TokenizerConfig("characters"))
    return build_corpus(documents, tokenizer, folder)


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def check_equal(batches, others):
    assert len(batches) == len(others)
    for one, other in zip(batches, others, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def reference(corpus):
    iterator = train_iterator(CausalLMExamples(corpus, 32), **RUN)
    batches = list(iterator)
    iterator.close()
    return batches


def test_batches_have_the_promised_arrays(reference):
    assert len(reference) == 12
    for batch in reference:
        assert set(batch) == {"input_ids", "labels", "segment_ids", "position_ids"}
        assert all(a.shape == (4, 32) and a.dtype == np.int32 for a in batch.values())


def test_an_epoch_holds_each_row_once_in_a_new_order():
    batches = TrainBatches(Numbers(10), batch_size=4, seed=0, num_steps=10)
    ids = np.concatenate([batches[step]["id"][:, 0] for step in range(10)])
    epochs = [ids[10 * e : 10 * e + 10] - 10 * e for e in range(4)]
    assert all(sorted(epoch) == list(range(1, 11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = TrainBatches(Numbers(10), batch_size=4, seed=1, num_steps=10)
    assert not np.array_equal(other[0]["id"], batches[0]["id"])


@pytest.mark.parametrize("size", [4, 3, 8])
def test_another_batch_size_goes_on_in_the_same_order(size):
    """Two batches of four, then batches of another size: each row once in an epoch."""
    run = {"seed": 7, "num_steps": 20}
    rows = [x["id"] for x in take(train_iterator(Numbers(20), batch_size=4, **run), 10)]
    iterator = train_iterator(Numbers(20), batch_size=size, start=2, examples_before=8, **run)
    iterator.set_state({"step": 2})
    others = np.concatenate([x["id"] for x in take(iterator, 4)])
    assert np.array_equal(others, np.concatenate(rows)[8 : 8 + 4 * size])


def test_one_row_is_enough():
    batches = TrainBatches(Numbers(1), batch_size=2, seed=-5, num_steps=1)
    assert batches[0]["id"].tolist() == [[1], [2]]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_share_the_same_global_batch(corpus, reference, count):
    rows = CausalLMExamples(corpus, 32)
    parts = []
    for index in range(count):
        iterator = train_iterator(rows, **RUN, process_index=index, process_count=count)
        parts.append(list(iterator))
        iterator.close()
    joined = [
        {name: np.concatenate([part[name] for part in step]) for name in step[0]}
        for step in zip(*parts, strict=True)
    ]
    check_equal(joined, reference)


@pytest.mark.slow
def test_workers_change_nothing_and_resume_anywhere(corpus, reference):
    rows = CausalLMExamples(corpus, 32)
    iterator = train_iterator(rows, **RUN, num_workers=2)
    batches = take(iterator, 5)
    state = iterator.get_state()
    iterator.close()
    iterator = train_iterator(rows, **RUN)
    iterator.set_state(state)
    check_equal(batches + list(iterator), reference)
    iterator.close()


def test_resume_goes_back_and_forth(corpus, reference):
    iterator = train_iterator(CausalLMExamples(corpus, 32), **RUN)
    take(iterator, 3)
    state = json.loads(json.dumps(iterator.get_state()))
    assert state == {"step": 3}
    take(iterator, 6)
    iterator.set_state(state)
    check_equal(list(iterator), reference[3:])
    assert iterator.get_state() == {"step": 12}
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(DataError, match="12 steps"):
        iterator.set_state({"step": 13})
    iterator.close()
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


RESUME = """
import json, pickle, sys
from pathlib import Path
from flaxzoo.data import CausalLMExamples, open_corpus, train_iterator
rows = CausalLMExamples(open_corpus(sys.argv[1]), 32)
iterator = train_iterator(rows, batch_size=4, seed=7, num_steps=12)
iterator.set_state(json.loads(sys.argv[2]))
Path(sys.argv[3]).write_bytes(pickle.dumps(list(iterator)))
iterator.close()
"""


def test_resume_in_a_new_process(corpus, reference, tmp_path):
    arguments = [str(corpus.folder), '{"step": 5}', str(tmp_path / "rest")]
    subprocess.run([sys.executable, "-W", "error", "-c", RESUME, *arguments], check=True)
    check_equal(pickle.loads((tmp_path / "rest").read_bytes()), reference[5:])


def test_state_goes_into_a_checkpoint(corpus, reference, tmp_path):
    import grain
    import orbax.checkpoint as ocp

    iterator = train_iterator(CausalLMExamples(corpus, 32), **RUN)
    take(iterator, 4)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(4, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
        take(iterator, 4)
        manager.wait_until_finished()
        manager.restore(
            4, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(iterator))
        )
    check_equal(list(iterator), reference[4:])
    iterator.close()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_evaluation_sees_every_pair_once(corpus, count):
    rows = CausalLMEvaluationExamples(corpus, 64)
    parts = [
        list(evaluation_batches(rows, batch_size=8, process_index=index, process_count=count))
        for index in range(count)
    ]
    assert {len(part) for part in parts} == {-(-rows.num_examples // 8)}
    labels = []
    for step in zip(*parts, strict=True):
        batch = {name: np.concatenate([part[name] for part in step]) for name in step[0]}
        assert batch["labels"].shape == (8, 64)
        labels += batch["labels"][batch["segment_ids"] > 0].tolist()
    starts = set(corpus.document_starts.tolist())
    assert labels == [t for i, t in enumerate(corpus.tokens.tolist()) if i not in starts]


@pytest.mark.parametrize("packing", ["concat", "first-fit"])
def test_sources_pickle_small(corpus, packing):
    rows = CausalLMExamples(corpus, 32, packing)
    before = rows.example(0, 0)
    batches = pickle.loads(pickle.dumps(TrainBatches(rows, **RUN)))
    check_equal([batches.examples.example(0, 0)], [before])
    assert len(pickle.dumps(rows)) < 1000
    assert open_corpus(corpus.folder) == corpus


def test_batch_that_does_not_divide():
    with pytest.raises(DataError, match=r"batch_size 6 .*4 processes"):
        train_iterator(Numbers(9), batch_size=6, seed=0, num_steps=1, process_count=4)
    with pytest.raises(DataError, match="batch_size 0"):
        next(evaluation_batches(Numbers(9), batch_size=0))
