"""Turns a trained reward model into a reward function that scores completions."""

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
from ...data.common.fields import require
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
    """A reward function `reward(contexts, completions)` that runs a trained reward model.

    The function encodes a prompt and its completion as `RewardData` does, with the reward model's
    tokenizer and chat template. A text that is longer than `length` raises an error.

    Args:
        model: the reward model. Its head must have a single label.
        params: the parameters of the model.
        tokenizer: the tokenizer of the reward model, which may differ from the policy's tokenizer.
        length: the maximum number of tokens of a text, as in the training of the reward model.
        mesh: the devices to shard the model over. If None, the model is on one device.
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
            folder: a run folder, a folder in the Hugging Face format, or a name on the hub.
            mesh: the devices to shard the model over. If None, the model is on one device.

        Raises:
            FileNotFoundError: the folder does not exist.
            RunError: the model does not have a head with a single label.
        """
        config, tokenizer = open_run(folder)
        head, num_labels = config.model.head, len(config.model.labels)
        require(
            (head, num_labels) == ("sequence_classification", 1),
            f"{folder} has the head {head} of {num_labels} labels, but a reward model has "
            "sequence_classification of one label: train a reward model with flaxzoo train reward",
            error=RunError,
        )
        model, params = load_finite(folder)
        return cls(model, params, tokenizer, length=config.data.length, mesh=mesh)

    def __call__(
        self, contexts: Sequence[Demonstration], completions: Sequence[str]
    ) -> list[float]:
        """Scores completions.

        Args:
            contexts: the prompts of the completions, before the chat template is applied.
            completions: the completions.
        """
        # If encoding fails in one process, `barrier` makes all processes fail. Otherwise, the other
        # processes would wait forever in a computation that this process does not start.
        together = nullcontext if self._mesh is None else barrier
        with together():
            rows = [
                as_classified(self._encoded(one, completion), self._tokenizer)
                for one, completion in zip(contexts, completions, strict=True)
            ]
        longest, num_rows = max(map(len, rows)), len(rows)
        # All processes run the model together, so their arrays must have equal shapes.
        if self._mesh is not None:
            longest, num_rows = greatest_everywhere(longest), greatest_everywhere(num_rows)
        require(
            longest <= self._length,
            f"a prompt and its completion have {longest} tokens, more than the "
            f"{self._length} that the reward model reads: lower objective.max_new_tokens, or train "
            "a reward model with a larger data.length",
            error=RunError,
        )
        shards = 1 if self._mesh is None else num_batch_shards(self._mesh)
        if jax.process_count() > 1:
            # All processes must run the same number of batches, so each process scores its rows in
            # one batch.
            size, length = round_up(power_of_two(num_rows), shards), self._length
            padded = pad_rows(rows, num_rows=size, length=padded_length(longest, length))
            rewards = self._of_batch(*padded)[: len(rows)]
        else:
            rewards = np.zeros(len(rows), np.float32)
            # A single process may use several batches, each with rows of similar length.
            for batch, size in padded_batches(list(map(len, rows)), self._length):
                chosen = [rows[i] for i in batch]
                padded = pad_batch(chosen, round_up(size, shards), self._length)
                rewards[batch] = self._of_batch(*padded)[: len(batch)]
        with together():
            check_outputs({"reward": rewards})
        return rewards.tolist()

    def _of_batch(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Returns the scores of this process's rows."""
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if self._mesh is not None:
            batch = shard_batch(batch, self._mesh)
        scores = self._scores(self._params, batch["input_ids"], batch["attention_mask"])
        # Several devices may hold copies of a shard. Keep one copy of each shard, and sort the
        # shards by row.
        parts = sorted(
            {part.index[0].start or 0: part.data for part in scores.addressable_shards}.items()
        )
        return np.concatenate([np.asarray(part) for _, part in parts])

    def _encoded(self, context: Demonstration, completion: str) -> list[int]:
        # Replace an empty completion, because the encoders reject it.
        completion = completion if completion.strip() else " "
        if isinstance(context, Dialogue):
            answer = {"role": "assistant", "content": completion}
            return Dialogue((*context.messages, answer), context.tools).encode(self._tokenizer).ids
        return encode_completion(self._tokenizer, context.prompt, completion).ids

    @functools.cached_property
    def _scores(self) -> Any:
        mesh = self._mesh
        apply = self._model.apply
        if mesh is not None:
            apply = over_mesh(apply, mesh, self._model.config)

        def scores(
            params: Params, ids: Int[Array, "R T"], mask: Int[Array, "R T"]
        ) -> Float[Array, " R"]:
            outputs: Any = apply({"params": params}, input_ids=ids, attention_mask=mask)
            return outputs.logits[:, 0]

        return jax.jit(scores)


def _placed(x: Array, sharding: Sharding) -> Array:
    """Places an array on the devices of a sharding, which may belong to several processes.

    Unlike `jax.device_put`, this function does not wait for processes that open the model later.
    """
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
