"""Rewards that are functions of texts, and the table of built-in rewards.

A reward is any Python function `reward(prompts, completions, **fields)` that returns a number for
each completion, or None for a completion without a reward. All arguments are lists with one entry
for each completion. `fields` are the other fields of the prompts' records, such as `answer`, and
the additional field `contexts`. It contains the prompts before the chat template is applied (for
dialogues, the conversations). A function may omit arguments that it does not use.
"""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...data.chat.policy import Prompt
from ...data.common.errors import UserError, suggest
from ...data.common.fields import require
from ..objectives.online import OnlineConfig

RewardFunction = Callable[..., Sequence[float | None]]
"""A function `reward(prompts, completions, **fields) -> list[float | None]`."""

# A sign right after a digit is an operator and does not belong to the number.
_NUMBER = re.compile(r"(?:(?<!\d)[-+])?\d+(?:\.\d+)?")
# A comma between groups of three digits separates thousands.
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def exact_match(
    completions: Sequence[str], answer: Sequence[object], **_: object
) -> list[float | None]:
    """Returns 1 for each completion that equals the answer, else 0.

    White space at the beginning and the end is ignored.

    Args:
        completions: the completions.
        answer: the right answer for each completion. A completion whose answer is None gets no
          reward.
    """
    return _equal(completions, answer, str.strip)


def arithmetic(
    completions: Sequence[str], answer: Sequence[object], **_: object
) -> list[float | None]:
    """Returns 1 for each completion whose last number equals the answer, else 0.

    Args:
        completions: the completions.
        answer: the right answer for each completion, a number or a text with a number. A completion
          whose answer is None gets no reward.
    """
    return _equal(completions, answer, _last_number)


def _equal(
    completions: Sequence[str], answer: Sequence[object], read: Callable[[str], object]
) -> list[float | None]:
    """Returns 1 if `read` returns the same value for a completion and its answer, else 0."""
    return [
        None if right is None else float(read(completion) == read(str(right)))
        for completion, right in zip(completions, answer, strict=True)
    ]


def _last_number(text: str) -> float:
    numbers = _NUMBER.findall(_THOUSANDS.sub("", text))
    # NaN does not equal anything, so a text that contains no number is never right.
    return float(numbers[-1]) if numbers else math.nan


def of_format(pattern: str) -> RewardFunction:
    """Returns a reward function: 1 if the whole completion matches a pattern, else 0.

    Args:
        pattern: a regular expression. `.` also matches a line feed.

    Raises:
        UserError: the pattern is not a regular expression.
    """
    try:
        form = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(
            f"the reward format:{pattern} must have a regular expression ({error})"
        ) from None
    return _each(lambda completion: form.fullmatch(completion) is not None)


def of_length(target: str) -> RewardFunction:
    """Returns a reward function that rewards completions for being close to a target length.

    The reward is 1 at the target length, and decreases linearly to 0 at the length 0 and at twice
    the target length.

    Args:
        target: the target number of characters, as a string.

    Raises:
        UserError: the target is not a number above 0.
    """
    problem = f"the reward length:{target} must have a number of characters above 0, as length:40"
    require(re.fullmatch(r"0*[1-9][0-9]*", target), problem)
    number = int(target)
    return _each(lambda completion: max(0.0, 1 - abs(len(completion) - number) / number))


def of_word(word: str) -> RewardFunction:
    """Returns a reward function: 1 if the completion contains a whole word, else 0.

    Args:
        word: a word, or several consecutive words.

    Raises:
        UserError: the word is empty.
    """
    require(word.strip(), "the reward contains: must have a word, as contains:cat")
    # Do not use `\b`, which fails for a word that begins or ends with punctuation.
    whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
    return _each(lambda completion: whole.search(completion) is not None)


def _each(score: Callable[[str], float]) -> RewardFunction:
    """Returns a reward function that calls `score` with each completion."""

    def reward(completions: Sequence[str], **_: object) -> list[float | None]:
        return [float(score(completion)) for completion in completions]

    return reward


BUILT_IN: Mapping[str, RewardFunction] = {"exact_match": exact_match, "arithmetic": arithmetic}
"""Maps the name of a reward without a parameter to its function."""
PARAMETRIC: Mapping[str, Callable[[str], RewardFunction]] = {
    "format:": of_format,
    "length:": of_length,
    "contains:": of_word,
}
"""Maps the prefix of a reward's name, as in `contains:cat`, to a function that creates the reward
from the rest of the name."""


def named_reward(name: str) -> RewardFunction:
    """Returns a built-in reward.

    Args:
        name: `exact_match`, `arithmetic`, `format:REGEX`, `length:N` or `contains:WORD`.

    Raises:
        UserError: the reward is unknown, or the part of its name after the colon is invalid.
    """
    kind, colon, value = name.partition(":")
    if kind + colon in PARAMETRIC:
        return PARAMETRIC[kind + colon](value)
    remedy = suggest(name, [*BUILT_IN, *PARAMETRIC])
    require(
        name in BUILT_IN,
        f"the reward {name!r} is neither a built-in reward nor a folder: {remedy} "
        "(see --objective.rewards)",
    )
    return BUILT_IN[name]


def function_name(function: Callable[..., object]) -> str:
    """Returns the name of a custom function for metrics and run folders."""
    return str(getattr(function, "__name__", type(function).__name__))


def rewards_of(
    settings: OnlineConfig,
    custom: Sequence[RewardFunction] = (),
    *,
    open_model: Callable[[str], RewardFunction],
) -> "Rewards":
    """Returns the rewards of a run: first the rewards in its settings, then the caller's functions.

    Args:
        settings: the objective of the run. Its rewards are names of built-in rewards or folders of
          reward models.
        custom: reward functions that the caller passed.
        open_model: a function that opens the reward model in a folder.

    Raises:
        UserError: the rewards are empty, a reward is unknown, or the number of weights differs from
          the number of rewards.
    """
    pairs: list[tuple[str, RewardFunction]] = []
    models: list[RewardFunction] = []
    for name in settings.rewards:
        path = Path(name).expanduser()
        if name not in BUILT_IN and path.is_dir():
            models.append(open_model(name))
            pairs.append((path.name, models[-1]))
        else:
            pairs.append((name.partition(":")[0], named_reward(name)))
    pairs += [(function_name(function), function) for function in custom]
    require(
        pairs,
        "objective.rewards is empty: name a reward, such as exact_match, or give functions "
        "in Python: train.train(config, folder, rewards=[…])",
    )
    weights = settings.reward_weights or (1.0,) * len(pairs)
    require(
        len(weights) == len(pairs),
        f"objective.reward_weights has {len(weights)} numbers for {len(pairs)} rewards: give a "
        "weight for each reward",
    )
    functions: dict[str, RewardFunction] = {}
    for name, function in pairs:
        # Several rewards may have the same name, but metrics need distinct names.
        while name in functions:
            name += "_"
        functions[name] = function
    return Rewards(functions, tuple(map(float, weights)), tuple(models))


@dataclass(frozen=True)
class Rewards:
    """The rewards of a run."""

    functions: Mapping[str, RewardFunction]
    """The reward functions, keyed by their names in the metrics."""
    weights: tuple[float, ...]
    """The weight of each reward in the total reward."""
    models: tuple[RewardFunction, ...] = ()
    """The functions that are reward models. All processes run these models together."""

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[str]
    ) -> NDArray[np.float32]:
        """Returns the rewards that F functions give R completions, float32 `[R, F]`.

        A missing reward is NaN.

        Raises:
            UserError: a record lacks a field that a function needs, or a function returns
              something other than a number or None for each completion.
        """
        # Records may have different fields. If a record lacks a field, the value is None.
        records = [prompt.fields for prompt in prompts]
        names = dict.fromkeys(itertools.chain(*records))
        given: dict[str, Sequence[object]] = {
            **{name: [record.get(name) for record in records] for name in names},
            "prompts": [prompt.text for prompt in prompts],
            "completions": list(completions),
            "contexts": [prompt.context for prompt in prompts],
        }
        columns = {}
        # Call models first. If another function failed in one process before a model runs, the
        # other processes would wait forever when they run the model.
        order = sorted(self.functions.items(), key=lambda item: item[1] not in self.models)
        for name, function in order:
            try:
                columns[name] = _checked(name, _call(name, function, given), len(completions))
            except Exception as error:
                error.add_note(f"raised by the reward {name}")
                raise
        return np.stack([columns[name] for name in self.functions], axis=1)


def weighted(rewards: NDArray[np.float32], weights: Sequence[float]) -> NDArray[np.float32]:
    """Returns the weighted sum of each completion's rewards `[R, F]`; NaN if all are missing."""
    total = np.nansum(rewards * np.asarray(weights, np.float32), axis=1)
    return np.where(np.isnan(rewards).all(axis=1), np.float32(np.nan), total)


def _call(name: str, function: RewardFunction, given: Mapping[str, Sequence[object]]) -> object:
    """Calls a reward function with the arguments that it accepts."""
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    missing = [x for x, p in named.items() if p.default is p.empty and x not in given]
    require(
        not missing,
        f"the reward {name} reads the field {', '.join(missing)}, but the prompts have "
        f"{', '.join(sorted(given))}: add it to the records, or choose another reward",
    )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return function(**{key: x for key, x in given.items() if takes_all or key in named})


def _checked(name: str, values: object, number: int) -> NDArray[np.float32]:
    """Checks the values that a reward function returned, and converts None to NaN."""
    listed = list(values) if isinstance(values, Sequence | np.ndarray) else []
    require(
        len(listed) == number,
        f"the reward {name} must return a list of {number} values, one per completion, got "
        f"{values!r:.100}",
    )
    for value in listed:
        is_number = isinstance(value, int | float | np.number) and math.isfinite(float(value))
        require(
            value is None or is_number,
            f"the reward {name} returned {value!r}: return a finite number, or None for a "
            "completion without a reward",
        )
    # numpy converts None to NaN.
    return np.asarray(listed, np.float32)
