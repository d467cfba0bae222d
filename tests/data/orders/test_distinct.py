"""Orders of batches: no text twice, two texts of each label, several data sets; for any process."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
from flaxzoo.data import DataError, TrainBatches
from flaxzoo.data.orders.by_label import label_order
from flaxzoo.data.orders.distinct import distinct_order
from flaxzoo.data.orders.mixed import MIXED
from hypothesis import given, settings
from hypothesis import strategies as st


@dataclass(frozen=True)
class Keyed:
    """Examples that say which they are."""

    text_keys: np.ndarray

    @property
    def num_examples(self):
        return len(self.text_keys)

    def batches(self, batch_size, seed, epoch):
        return distinct_order(self.text_keys, batch_size, seed, epoch)

    def example(self, epoch, index):
        return {"epoch": np.array(epoch), "index": np.array(index)}


rows = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.tuples(*[st.integers(-1, 60)] * width).map(lambda row: (abs(row[0]), *row[1:])),
        min_size=8,
        max_size=60,
    )
)


@settings(max_examples=60, deadline=None)
@given(rows, st.integers(1, 6), st.integers(-3, 3), st.integers(0, 3))
def test_no_text_is_twice_in_a_batch(rows, batch_size, seed, epoch):
    keys = np.array(rows)
    try:
        order = distinct_order(keys, batch_size, seed, epoch)
    except DataError:
        return
    assert order.shape == (-(-len(keys) // batch_size), batch_size)
    for batch in order:
        texts = [text for index in batch for text in {*keys[index].tolist()} - {-1}]
        assert len(texts) == len({*texts})
        assert len({*batch.tolist()}) == batch_size
    assert np.array_equal(order, distinct_order(keys, batch_size, seed, epoch))


@settings(max_examples=40, deadline=None)
@given(st.integers(16, 80), st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**33))
def test_an_epoch_has_every_example(number, repeats, batch_size, seed):
    """As with questions about paragraphs, a few of which belong to the same one."""
    keys = np.stack([1000 + np.arange(number), np.arange(number) // repeats], axis=1)
    if number < batch_size * repeats * 3:
        return
    orders = [distinct_order(keys, batch_size, seed, epoch) for epoch in range(2)]
    for order in orders:
        counts = np.bincount(order.ravel(), minlength=number)
        assert counts.max() <= 2
        assert counts.sum() - number < batch_size
    # What does not find a batch in one epoch is rare.
    missing = [np.bincount(order.ravel(), minlength=number) == 0 for order in orders]
    assert np.mean(missing) < 0.1
    assert not np.array_equal(*orders)


KEYS = np.stack([100 + np.arange(50), np.arange(50) // 4], axis=1)


def whole(batches, steps):
    return [(batch["epoch"].tolist(), batch["index"].tolist()) for batch in map(batches, steps)]


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 3))
def test_examples_without_keys_are_not_repeated_in_a_batch(number, batch_size, seed):
    keys = np.full((number, 2), -1)
    if number < batch_size:
        with pytest.raises(DataError):
            distinct_order(keys, batch_size, seed, 0)
        return
    for batch in distinct_order(keys, batch_size, seed, 0):
        assert len({*batch.tolist()}) == batch_size


def test_steps_are_the_same_in_any_order_and_for_any_number_of_processes():
    batches = TrainBatches(Keyed(KEYS), 8, seed=3, num_steps=20)
    steps = range(20)
    found = whole(batches.__getitem__, steps)
    again = pickle.loads(pickle.dumps(batches))
    assert whole(again.__getitem__, reversed(steps)) == found[::-1]
    # Seven batches are an epoch.
    assert [{*epochs} for epochs, _ in found] == [{step // 7} for step in steps]
    parts = [TrainBatches(Keyed(KEYS), 8, 3, 20, index, 2) for index in range(2)]
    for step in steps:
        joined = np.concatenate([part[step]["index"] for part in parts])
        assert joined.tolist() == found[step][1]


def test_a_batch_that_cannot_be_filled_is_refused():
    with pytest.raises(DataError, match=r"batch_size 14 .* 13"):
        TrainBatches(Keyed(KEYS), 14, seed=0, num_steps=1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=4, max_size=60), st.integers(2, 6), st.integers(0, 3))
def test_each_label_of_a_batch_has_two_texts(labels, half, epoch):
    labels, batch_size = np.array(labels), 2 * half
    try:
        order = label_order(labels, batch_size, 0, epoch)
    except DataError:
        return
    assert order.shape[1] == batch_size
    assert order.shape == label_order(labels, batch_size, 0, epoch + 1).shape
    for batch in order:
        _, counts = np.unique(labels[batch], return_counts=True)
        assert len(counts) > 1
        assert counts.min() > 1
        assert len({*batch.tolist()}) == batch_size


@pytest.mark.parametrize(
    ("labels", "batch_size", "named"),
    [([0, 0, 1, 1], 5, "batch_size 5"), ([0, 0, 1], 4, "1 labels"), ([0, 0, 1, 1], 6, "at most 4")],
)
def test_labels_that_fill_no_batch_are_refused(labels, batch_size, named):
    with pytest.raises(DataError, match=named):
        label_order(np.array(labels), batch_size, 0, 0)


def test_data_sets_take_turns_or_have_all_their_batches():
    orders = [np.arange(6).reshape(3, 2), 10 + np.arange(4).reshape(2, 2)]
    whole = MIXED["proportional"](orders, 0, 0)
    assert sorted(whole.tolist()) == np.concatenate(orders).tolist()
    assert not np.array_equal(whole, MIXED["proportional"](orders, 0, 2))
    turns = MIXED["round_robin"](orders, 0, 0)
    assert turns.tolist() == [[0, 1], [10, 11], [2, 3], [12, 13]]
