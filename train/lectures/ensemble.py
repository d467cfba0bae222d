"""An ensemble of models, which predicts the mean of the models' probabilities."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...data.common.fields import NonNegative, PositiveInt, check_value, require
from ...data.common.progress import LogFn
from ...data.features.predictions import softmax
from ...data.sources.documents import SourceLike
from ...models.heads.specs import CAUSAL_HEADS, require_head
from ...models.nn.typing import Array, Float, Int, Params
from ...models.text.generate import TextGenerator
from ..evaluation.predict import Predictor, token_length


class Ensemble:
    """Several models. Their joint prediction is the mean of their probabilities.

    Unlike in a mixture of experts, every model of an ensemble computes every prediction.

    Example::

        ensemble = train.Ensemble(["runs/a", "runs/b", "runs/c"])
        print(ensemble.predict(["the food was great."]))  # of classifiers
        print(ensemble.generate("The for statement", max_new_tokens=20))  # of language models

    Args:
        folders: the models: run folders, folders in the Hugging Face format, or names on the hub.

    Raises:
        UserError: there are fewer than two models.
    """

    def __init__(self, folders: Sequence[str | Path]) -> None:
        problem = f"folders must be at least two models, got {folders!r}: use one model by itself"
        require(not isinstance(folders, str) and len(folders) > 1, problem)
        self._folders = tuple(folders)

    def predict(self, path: SourceLike, *, log: LogFn = print) -> list[Any]:
        """Classifies texts by the mean of the models' probabilities.

        Every model encodes the texts with its own tokenizer.

        Args:
            path: a file or a list of examples, as for `train.predict`.
            log: called with a line that describes the file.

        Returns:
            A prediction for each example, as from `train.predict`.

        Raises:
            UserError: a model is not a classifier with one label per text, or the labels of the
              models differ.
        """
        members = list(map(Predictor.of_run, self._folders))
        labels = members[0].config.model.labels
        for folder, member in zip(self._folders, members, strict=True):
            target = getattr(member.config.data, "label_target", None)
            require(
                member.config.model.head == "sequence_classification" and target == "single_label",
                f"{folder} must classify texts by one label, got the head "
                f"{member.config.model.head!r} and the target {target!r}: leave {folder} out",
            )
            require(
                member.config.model.labels == labels,
                f"{folder} must have the labels {', '.join(labels)}, got "
                f"{', '.join(member.config.model.labels)}: leave {folder} out",
            )
        splits: list[Any] = [member.encode(path) for member in members]
        log(f"input: {splits[0].summary}")
        # The softmax of the log of the mean is the mean again.
        mean = np.mean([*map(_probabilities, members, splits)], axis=0)
        return splits[0].examples.decode({"logits": np.log(mean)})

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: PositiveInt = 50,
        temperature: NonNegative = 1.0,
        seed: int = 0,
    ) -> str:
        """Continues a text; samples each token from the mean of the models' probabilities.

        For each token, every model processes the whole text again, without a KV cache.

        Args:
            prompt: the text, which must have at least one token.
            max_new_tokens: maximum number of new tokens. An end token ends the text earlier.
            temperature: divides the logarithms of the mean; with 0, the most probable token is
              taken.
            seed: the seed for sampling.

        Returns:
            The new text.

        Raises:
            UserError: a model is not a language model, or the tokenizers differ.
        """
        check_value("max_new_tokens", max_new_tokens, PositiveInt)
        check_value("temperature", temperature, NonNegative)
        members = list(map(TextGenerator.of_run, self._folders))
        tokenizer = members[0].tokenizer
        ids = [*tokenizer.begins_document, *tokenizer.encode(prompt, add_special_tokens=False)]
        require(ids, "prompt must have at least one token, got an empty text: write its beginning")
        for folder, member in zip(self._folders, members, strict=True):
            model, _ = member.loaded
            require_head(model.config, CAUSAL_HEADS, "writes no text", "give a language model")
            require(
                member.vocab_size == members[0].vocab_size
                and member.tokenizer.encode(prompt) == tokenizer.encode(prompt),
                f"{folder} must have the tokenizer of {self._folders[0]}: their tokens differ",
            )
        start, end = len(ids), tokenizer.special_ids.eos
        tokens = _tokens([member.loaded for member in members], ids, temperature, seed)
        for token in itertools.islice(tokens, max_new_tokens):
            if token == end:
                break
            ids.append(token)
        return tokenizer.decode(ids)[len(tokenizer.decode(ids[:start])) :]


def _probabilities(member: Predictor, split: Any) -> np.ndarray:
    """Returns the probability of each label for N encoded texts, float64 `[N, labels]`."""
    rows = [split.examples.example(0, i) for i in range(split.examples.num_examples)]
    return softmax(member.outputs(rows.__getitem__, [*map(token_length, rows)])["logits"])


def mean_probabilities(
    members: Sequence[tuple[Any, Params]], input_ids: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
    """Returns the next-token probabilities, averaged over models with the same vocabulary.

    Args:
        members: models and their parameters.
        input_ids: the tokens.
    """
    outputs = [model.apply({"params": params}, input_ids=input_ids) for model, params in members]
    logits = jnp.stack([output.logits.astype(jnp.float32) for output in outputs])
    return jnp.mean(jax.nn.softmax(logits, axis=-1), axis=0)


def _tokens(
    members: Sequence[tuple[Any, Params]], ids: list[int], temperature: float, seed: int
) -> Iterator[int]:
    """Yields the next token after `ids`; the caller appends the token to `ids`."""
    models, params = zip(*members, strict=True)
    longest = min(model.config.max_length for model in models)

    @jax.jit
    def following(params: Sequence[Params], row: Array, last: Array) -> Array:
        pairs = list(zip(models, params, strict=True))
        return mean_probabilities(pairs, row[None])[0, last]

    key = jax.random.key(seed)
    while True:
        # Keep the last tokens of the text, up to the length that every model supports, and pad
        # them.
        row = ids[-longest:]
        padded = np.pad(np.asarray(row, np.int32), (0, longest - len(row)))
        scores = jnp.log(following(params, padded, len(row) - 1))
        key, draw = jax.random.split(key)
        chosen = (
            jax.random.categorical(draw, scores / temperature) if temperature else scores.argmax()
        )
        yield int(chosen)
