"""The tasks of the experiments with instructions and refusals."""

import pytest

from .lectures import COPIES, HELD_OUT, MARKS, ORDERS, TASKS, Task


@pytest.mark.parametrize(
    ("order", "marks", "answer"),
    [
        ("copy", "plain", "a b c"),
        ("reverse", "brackets", "[ c b a ]"),
        ("rotate", "stars", "* b c a *"),
        ("swap", "quotes", '" b a c "'),
        ("first", "plus", "+ a"),
        ("last", "point", "c ."),
    ],
)
def test_answers_and_requests(order, marks, answer):
    task = Task(order, marks)
    assert task.line("abc") == f" a b c > {answer}\n"
    assert task.instruction("abc") == f" {order} with {marks} : a b c >"


def test_a_held_out_instruction_is_a_new_pair_of_known_words():
    assert not {*TASKS} & {*HELD_OUT}
    assert len(TASKS) + len(HELD_OUT) == len(ORDERS) * len(MARKS) == 36
    assert {task.order for task in TASKS} == {task.order for task in HELD_OUT} == {*ORDERS}
    assert {task.marks for task in TASKS} == {task.marks for task in HELD_OUT} == {*MARKS}
    assert [task.marks for task in COPIES] == [*MARKS]
