"""A reward model as a reward: scores of answers by a trained model of a single number."""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from ...data.chat.encoding import encode_completion
from ...data.chat.preference_pairs import as_classified
from ...data.chat.records import Demonstration, Dialogue
from ...data.common.errors import RunError
from ...data.tokenizers.base import Tokenizer
from ...models.decoding.padding import pad_rows, power_of_two, round_up
from ...models.finite import check_outputs, load_finite
from ...models.model import Model
from ...models.nn.typing import Array, Float, Int, Params
from ...models.text.bucketing import pad_batch, padded_batches, padded_length
from ..distributed.expert_parallel import over_mesh
from ..distributed.multiprocess import barrier, greatest_everywhere
from ..distributed.sharding import (
    num_batch_shards,
    parameter_shardings,
    shard_batch,
)
from ..runs.load_run import open_run


class RewardModel:
    """The score of a trained reward model, as `reward(begun, completions)`.

    It reads a prompt and its completion as `RewardData` writes them: by its own tokenizer and chat
    template, up to as many tokens as its run was trained on; longer ones are an error.

    Args:
        model: the model, whose head has a single label.
        params: its parameters.
        tokenizer: its own.
        length: the number of tokens that it reads at most.
        mesh: the devices that it is divided over; None: it is on one.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer,
        *,
        length: int,
        mesh: Mesh | None = None,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._length, self._mesh = length, mesh
        if mesh is not None:
            params = jax.tree.map(_placed, params, parameter_shardings(params, mesh, model.config))
        self._params = params

    @classmethod
    def of_run(cls, folder: str | Path, mesh: Mesh | None = None) -> "RewardModel":
        """Opens a reward model.

        Args:
            folder: a run folder, one in Hugging Face's form, or a name on the hub.
            mesh: the devices that it is divided over; None: it is on one.

        Raises:
            FileNotFoundError: there is no such folder.
            RunError: the model has no head of a single number.
        """
        config, tokenizer = open_run(folder)
        if config.model.head != "sequence_classification" or len(config.model.labels) != 1:
            labels = f" of {len(config.model.labels)} labels" if config.model.labels else ""
            raise RunError(
                f"{folder} has the head {config.model.head}{labels}, and a reward model has "
                "sequence_classification of one label: train one with flaxzoo train reward"
            )
        model, params = load_finite(folder)
        return cls(model, params, tokenizer, length=config.data.length, mesh=mesh)

    def __call__(self, begun: Sequence[Demonstration], completions: Sequence[str]) -> list[float]:
        """Scores completions.

        Args:
            begun: the prompt of each.
            completions: the completions.
        """
        # No process may wait in a computation that another one, which fails, does not begin.
        together = nullcontext if self._mesh is None else barrier
        with together():
            rows = [
                as_classified(self._encoded(one, completion), self._tokenizer)
                for one, completion in zip(begun, completions, strict=True)
            ]
        longest, number = max(map(len, rows)), len(rows)
        if self._mesh is not None:  # all processes compute together, on equal shapes
            longest, number = greatest_everywhere(longest), greatest_everywhere(number)
        if longest > self._length:
            raise RunError(
                f"a prompt and its answer have {longest} tokens, and the reward model reads "
                f"{self._length}: lower objective.max_new_tokens, or train one with a larger "
                "data.length"
            )
        shards = 1 if self._mesh is None else num_batch_shards(self._mesh)
        if jax.process_count() > 1:
            size, length = round_up(power_of_two(number), shards), self._length
            given = pad_rows(rows, num_rows=size, length=padded_length(longest, length))
            found = self._of_batch(*given)[: len(rows)]
        else:
            found = np.zeros(len(rows), np.float32)
            for batch, number in padded_batches([len(row) for row in rows], self._length):
                chosen = [rows[i] for i in batch]
                given = pad_batch(chosen, round_up(number, shards), self._length)
                found[batch] = self._of_batch(*given)[: len(batch)]
        with together():
            check_outputs({"reward": found})
        return found.tolist()

    def _of_batch(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Returns the scores of this process's rows."""
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if self._mesh is not None:
            batch = shard_batch(batch, self._mesh)
        scores = self._scores(self._params, batch["input_ids"], batch["attention_mask"])
        parts = sorted(
            {part.index[0].start or 0: part.data for part in scores.addressable_shards}.items()
        )
        return np.concatenate([np.asarray(part) for _, part in parts])

    def _encoded(self, begun: Demonstration, completion: str) -> list[int]:
        completion = completion if completion.strip() else " "  # an answer that is not empty
        if isinstance(begun, Dialogue):
            answer = {"role": "assistant", "content": completion}
            return Dialogue((*begun.messages, answer), begun.tools).encode(self._tokenizer).ids
        return encode_completion(self._tokenizer, begun.prompt, completion).ids

    @functools.cached_property
    def _scores(self) -> Any:
        mesh = self._mesh
        apply = (
            self._model.apply
            if mesh is None
            else over_mesh(self._model.apply, mesh, self._model.config)
        )

        def scores(
            params: Params, ids: Int[Array, "R T"], mask: Int[Array, "R T"]
        ) -> Float[Array, " R"]:
            outputs: Any = apply({"params": params}, input_ids=ids, attention_mask=mask)
            return outputs.logits[:, 0]

        return jax.jit(scores)


def _placed(x: Array, sharding: Sharding) -> Array:
    """Returns an array over devices, also those of processes that open the model later."""
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
