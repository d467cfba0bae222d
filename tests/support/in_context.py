"""How well a model answers after so many examples of a task that it was never trained on."""

from collections.abc import Sequence

import jax
import numpy as np
from flaxzoo.data import Patterns, Tokenizer
from flaxzoo.data.sources.patterns import Episode
from flaxzoo.models.nn.typing import Params


def accuracy_by_shots(
    model, params: Params, tokenizer: Tokenizer, episodes: Sequence[Episode], shots: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Returns the fraction of answers that the model would write, whole and without sampling.

    All numbers of shots come from one pass over each episode: the answer of its example `k` has
    `k` examples before it. An answer counts if each of its tokens and the line feed after it are
    the most probable ones.

    Args:
        model: a decoder.
        params: its parameters.
        tokenizer: one of characters, with a token that begins a text.
        episodes: the episodes, each with more examples than the most shots.
        shots: the numbers of examples before an answer.

    Returns:
        Of each kind of task, and of `all` of them, the accuracy after each number of shots.
    """
    right: dict[str, dict[int, list[bool]]] = {"all": {k: [] for k in shots}}
    greedy = jax.jit(lambda ids: model.apply({"params": params}, input_ids=ids).logits.argmax(-1))
    length = model.config.max_length
    rows = np.zeros((len(episodes), length), np.int32)
    for row, episode in zip(rows, episodes, strict=True):
        ids = [tokenizer.special_ids.bos, *tokenizer.encode(episode.text)]
        row[: len(ids)] = ids[:length]
    predicted = np.concatenate([greedy(rows[i : i + 20]) for i in range(0, len(rows), 20)])
    for row, guesses, episode in zip(rows, predicted, episodes, strict=True):
        of_kind = right.setdefault(episode.task.kind, {k: [] for k in shots})
        ends = np.cumsum([len(line) for line in episode.lines])
        for k in shots:
            start = ends[k] - len(episode.examples[k][1])  # of the answer; a token begins the text
            correct = bool((guesses[start - 1 : ends[k]] == row[start : ends[k] + 1]).all())
            of_kind[k].append(correct)
            right["all"][k].append(correct)
    return {kind: {k: float(np.mean(x)) for k, x in of.items()} for kind, of in right.items()}
