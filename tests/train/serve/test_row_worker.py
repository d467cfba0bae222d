"""Rows of several requests share batches; without a model and without HTTP."""

from flaxzoo.models.text.bucketing import padded_length
from flaxzoo.train.serve import engine
from flaxzoo.train.serve.rows.settings import RowSettings
from flaxzoo.train.serve.rows.worker import Row, RowFunction, RowWorker, shapes_of_short_rows

LONGEST = 64


class Task(engine.Task):
    """A task without a job, which keeps its result."""

    def __init__(self, work):
        self.work, self.found, self.ended = work, None, False

    def send(self, found, *, last=False):
        assert last
        self.found = found

    def fail(self, error):
        self.found = error.status


class Requests:
    """A worker, what it computed, and what its tasks received."""

    def __init__(self, **settings):
        self.batches, self.now, self.lines = [], 0.0, []
        function = RowFunction(None, self.parts, LONGEST, lambda length: "x" * length)
        settings = RowSettings(**settings)
        shapes = shapes_of_short_rows(function, settings)
        self.worker = RowWorker(
            "words", function, settings,
            shapes=shapes, log=self.lines.append, clock=lambda: self.now,
        )  # fmt: skip

    @property
    def wait(self):
        wait = self.worker.wait
        assert wait is not None
        return wait

    def parts(self, items):
        self.batches.append([*items])
        if "bad" in items:
            raise ValueError("bad")
        yield [item.upper() for item in items]

    def add(self, text, group=None, copies=1):
        task = Task(Row(text, len(text), group, copies))
        self.worker.add(task)
        return task


def test_a_row_waits_for_others_only_a_few_milliseconds():
    requests = Requests()
    assert requests.worker.wait is None
    requests.add("a")
    assert 0 < requests.wait <= 0.003
    requests.now += 0.002
    requests.add("b")
    assert 0 < requests.wait <= 0.0011
    requests.now += 0.0011
    assert requests.worker.wait == 0
    requests.worker.step()
    assert requests.batches == [["a", "b"]]
    assert requests.worker.wait is None


def test_a_full_batch_does_not_wait():
    requests = Requests()
    for _ in range(31):
        requests.add("a")
    assert requests.wait > 0
    requests.add("a")
    assert requests.worker.wait == 0


def test_the_oldest_row_is_computed_first_with_rows_of_similar_length():
    requests = Requests()
    short = requests.add("b")
    tasks = [requests.add("a" * (40 - i)) for i in range(16)]
    requests.worker.step()
    assert requests.batches == [["b"]]
    assert (short.found, tasks[0].found) == ("B", None)
    requests.worker.step()
    assert len(requests.batches[1]) == 16
    assert [task.found for task in tasks] == ["A" * (40 - i) for i in range(16)]


def test_a_batch_has_one_group_and_no_more_tokens_than_allowed():
    requests = Requests(batch_tokens=48)
    for group in "xyxyxx":
        requests.add("a", group)
    sizes = []
    while requests.worker.wait is not None:
        requests.worker.step()
        sizes.append(len(requests.batches[-1]))
    assert sum(sizes) == 6
    assert all(size * padded_length(1, LONGEST) <= 48 for size in sizes)
    # A row that is longer than the limit is computed alone.
    long = requests.add("b" * 60)
    requests.worker.step()
    assert long.found == "B" * 60


def test_a_long_computation_leaves_time_to_others_and_ends_with_its_clients():
    lines, done = [], []

    def parts(items):
        for part in range(3):
            done.append(part)
            yield None
        yield [item.upper() for item in items]

    function = RowFunction(None, parts, LONGEST, lambda length: "x")
    worker = RowWorker("words", function, log=lines.append)
    first, last = Task(Row("a", 1, group=1)), Task(Row("b", 1, group=2))
    worker.add(first)
    worker.add(last)
    for number in range(1, 4):
        worker.step()
        assert (len(done), first.found, worker.wait) == (number, None, 0.0)
    worker.step()
    assert (first.found, last.found) == ("A", None)
    worker.step()
    last.ended = True
    worker.cancel(last)
    worker.step()
    assert worker.wait is None
    assert done == [0, 1, 2, 0, 1]


def test_a_batch_that_fails_does_not_end_others(capsys):
    requests = Requests()
    bad, good = requests.add("bad", group=1), requests.add("good", group=2)
    requests.worker.step()
    requests.worker.step()
    assert (bad.found, good.found) == (500, "GOOD")
    assert "ValueError: (message withheld)" in capsys.readouterr().err


def test_a_canceled_row_leaves_before_its_batch():
    requests = Requests()
    tasks = [requests.add(letter) for letter in "abc"]
    requests.worker.cancel(tasks[1])
    requests.worker.step()
    assert requests.batches == [["a", "c"]]
    requests.worker.cancel(tasks[0])  # which has ended
    requests.add("d")
    requests.worker.reset()
    assert requests.worker.wait is None


def test_short_batches_are_compiled_and_listed():
    requests = Requests(warm_up_length=20)
    requests.worker.warm_up()
    shapes = [(len(batch), len(batch[0])) for batch in requests.batches]
    assert shapes == [(2**i, length) for length in (16, 32) for i in range(6)]
    *compiled, left = requests.lines
    assert [line.partition(" compiled")[0] for line in compiled] == [
        f"words: {rows} × {length} tokens" for rows, length in shapes
    ]
    assert "more than 32 tokens compile at first use" in left
    lines = []
    RowWorker("words", RowFunction(None, iter, LONGEST, str), log=lines.append).warm_up()
    assert lines == ["words: compiles at first use; --warm-up-all compiles more now"]


def test_all_lengths_are_compiled_if_asked():
    requests = Requests(warm_up_all=True)
    requests.worker.warm_up()
    assert {len(batch[0]) for batch in requests.batches} == {16, 32, 48, 64}
    assert not any("first use" in line for line in requests.lines)


def test_rows_of_many_sequences_share_smaller_batches():
    """As the beams of translations, whose batch other work waits for."""
    requests = Requests()
    for copies in (8, 32):
        for i in range(6):
            requests.add(f"{i}", group=copies, copies=copies)
    while requests.worker.wait is not None:
        requests.worker.step()
    assert [len(batch) for batch in requests.batches] == [4, 2, *[1] * 6]
