"""Samples answers on the devices, and scores them with the policy and the reference model.

A rollout is a batch of sampled answers. It has R rows of T = P + N tokens, and G rows for each
prompt. A row consists of a prompt, padded on the left to P tokens, and an answer, padded on the
right to N tokens. All results depend only on the parameters, the prompts, the rewards and the key
of the step.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ....data.common.fields import without_none
from ....models.adapters.lora import LoRA
from ....models.decoding.rollout import Answers, sample_answers
from ....models.decoding.unstack_layers import unstack_layers
from ....models.mesh_axes import BATCH_AXES
from ....models.model import Model
from ....models.nn.dropout import row_keys
from ....models.nn.typing import Array, Bool, Float, Int, Key, Params
from ...distributed.expert_parallel import over_mesh
from ...losses.answers import label_log_probs
from ...losses.micro_batches import in_parts
from ...losses.objective import ApplyFn, Batch, Terms


@struct.dataclass
class Rollout:
    """Sampled answers. Each row contains a prompt and its answer."""

    input_ids: Int[Array, "R T"]
    labels: Int[Array, "R T"]
    """The token that follows each input token."""
    attention_mask: Int[Array, "R T"]
    loss_mask: Int[Array, "R T"]
    """1 for the labels that belong to the answer."""
    ended: Bool[Array, " R"]
    """Whether the answer of each row contains an end token."""
    real: Bool[Array, " R"]
    """Whether each row has a prompt; false for filler rows at the end of an evaluation."""

    @property
    def batch(self) -> dict[str, Array]:
        """The arrays that the model and the objective take as inputs."""
        names = ("input_ids", "labels", "attention_mask", "loss_mask")
        return {name: getattr(self, name) for name in names}

    @property
    def lengths(self) -> Float[Array, " R"]:
        """The number of tokens of each answer, including the end token."""
        return jnp.sum(self.loss_mask, axis=1).astype(jnp.float32)


def rollout_of(
    prompt_ids: Int[Array, "R P"],
    prompt_mask: Int[Array, "R P"],
    answers: Answers,
    end_ids: tuple[int, ...],
) -> Rollout:
    """Concatenates prompts and answers into rows."""
    # Labels and their mask are shifted by one, because position t predicts token t + 1.
    ids = jnp.concatenate([prompt_ids, answers.tokens], axis=1)  # [R, T]
    attention_mask = jnp.concatenate([prompt_mask, answers.mask], axis=1)
    is_answer = jnp.concatenate([jnp.zeros_like(prompt_mask), answers.mask], axis=1)
    # Find which tokens of an answer are end tokens, [R, N].
    is_end = jnp.any(answers.tokens[..., None] == jnp.asarray(end_ids, jnp.int32), axis=-1)
    last = jnp.zeros_like(ids[:, :1])
    return Rollout(
        input_ids=ids,
        labels=jnp.concatenate([ids[:, 1:], last], axis=1),
        attention_mask=attention_mask,
        loss_mask=jnp.concatenate([is_answer[:, 1:], last], axis=1),
        ended=jnp.any(is_end & (answers.mask != 0), axis=1),
        real=jnp.any(prompt_mask != 0, axis=1),
    )


def samples_stacked(mesh: Mesh) -> bool:
    """Returns whether a policy samples with stacked layers, and gathers them one at a time."""
    return mesh.shape["fsdp"] > 1


@dataclasses.dataclass(frozen=True)
class RolloutPrograms:
    """The functions that sample and score answers over a mesh, which the caller compiles."""

    model: Model
    apply_fn: ApplyFn
    """The model's `apply`, wrapped as for the train step."""
    mesh: Mesh
    temperature: float
    """The sampling temperature, which divides the logits."""
    answer_length: int
    """The maximum number of tokens of an answer, N."""
    end_ids: tuple[int, ...]
    """The ids of the tokens that end an answer."""
    num_parts: int = 1
    """The number of equal parts of a rollout, which are scored sequentially to save memory."""
    adapter: LoRA | None = None
    """The adapters, if the policy trains adapters on a frozen base model."""

    def sample(
        self,
        params: Params,
        frozen: Params | None,
        prompts: Batch,
        rng: Key[Array, ""],
        *,
        group_size: int,
    ) -> Rollout:
        """Samples G answers to each prompt. Row r is answer r mod G to prompt r // G.

        Args:
            params: the trained parameters of the train state.
            frozen: the frozen parameters of the train state.
            prompts: `prompt_ids` and `prompt_mask` `[B, P]`; in an evaluation, also `index` `[B]`,
                the index of each prompt in the whole evaluation.
            rng: the key of the step.
            group_size: the number of answers to each prompt, G.
        """
        by_row = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

        def repeated(x: Array) -> Array:
            rows = jnp.repeat(x, group_size, axis=0)
            return jax.lax.with_sharding_constraint(rows, by_row)

        ids, mask = repeated(prompts["prompt_ids"]), repeated(prompts["prompt_mask"])
        # In an evaluation, the keys depend on the row's index in the whole evaluation, so that an
        # answer does not depend on the other prompts of its batch.
        model, params, apply_fn = self._for_sampling(params, frozen)
        answers = sample_answers(
            model,
            params,
            ids,
            mask,
            keys=row_keys(rng, ids.shape[0], prompts["index"][0] if "index" in prompts else 0),
            max_new_tokens=self.answer_length,
            end_ids=self.end_ids,
            temperature=self.temperature,
            apply_fn=over_mesh(apply_fn, self.mesh, model.config),
        )
        return rollout_of(ids, mask, answers, self.end_ids)

    def _for_sampling(self, params: Params, frozen: Params | None) -> tuple[Model, Params, ApplyFn]:
        """Returns the model, its parameters and its `apply` in the layout for sampling."""
        if samples_stacked(self.mesh):
            # Stacked layers are gathered one at a time. If layers were not stacked, they would all
            # be gathered before the decode loop.
            if self.adapter is None:
                return self.model, params, self.model.apply
            policy, _ = self.adapter.combine(params, frozen)
            return self.model, policy, self.adapter.adapt(self.model.apply)
        if self.adapter is not None:
            assert frozen is not None
            params = self.adapter.merge(params, frozen)
        model, params = unstack_layers(self.model, params)
        return model, params, model.apply

    def log_probs(
        self, params: Params, frozen: Params | None, rollout: Rollout, *, reference: bool
    ) -> dict[str, Float[Array, "R T"]]:
        """Computes the labels' log-probabilities under policy and reference model, without dropout.

        Args:
            params: the trained parameters of the train state.
            frozen: the frozen parameters of the train state.
            rollout: the answers.
            reference: whether the reference model also scores the answers.

        Returns:
            `log_probs` and `entropy` of the policy, in nats and at the sampling temperature;
            `values` if the model has a value head; `reference_log_probs` if `reference` is true.
        """
        # If adapters are trained, `frozen` is their base model, and the reference is this base
        # model alone.
        policy, reference_params = params, frozen
        if self.adapter is not None:
            policy, reference_params = self.adapter.combine(params, frozen)
        scored = self._of_model(policy, rollout)
        if reference:
            assert reference_params is not None
            scored["reference_log_probs"] = self._of_model(reference_params, rollout)["log_probs"]
        return jax.lax.stop_gradient(scored)

    def _of_model(self, params: Params, rollout: Rollout) -> dict[str, Float[Array, "R T"]]:
        apply_fn = self.apply_fn if self.adapter is None else self.adapter.adapt(self.apply_fn)

        def of_part(part: dict[str, Array]) -> dict[str, Array]:
            outputs: Any = apply_fn(
                {"params": params},
                input_ids=part["input_ids"],
                attention_mask=part["attention_mask"],
            )
            scores = label_log_probs(outputs, part, self.temperature)
            scored = {
                "log_probs": scores.log_prob,
                "entropy": scores.entropy,
                # None unless the model has a value head.
                "values": getattr(outputs, "values", None),
            }
            return without_none(scored)

        return in_parts(of_part, rollout.batch, self.num_parts)


def weighted_rewards(
    rewards: Float[Array, "R F"], weights: tuple[float, ...]
) -> Float[Array, " R"]:
    """Returns the weighted sum of each answer's rewards; NaN for an answer without rewards."""
    # `nansum` is 0 where all rewards are NaN, so restore the NaN.
    total = jnp.nansum(rewards * jnp.asarray(weights), axis=1)
    return jnp.where(jnp.all(jnp.isnan(rewards), axis=1), jnp.nan, total)


def rollout_metrics(
    rollout: Rollout,
    rewards: Float[Array, "R F"],
    total: Float[Array, " R"],
    names: Sequence[str],
    scored: Mapping[str, Float[Array, "R T"]],
) -> tuple[Terms, Terms]:
    """Returns the sum and the count of each metric of a rollout, named as in TRL.

    Args:
        rollout: the answers.
        rewards: the reward that each function gives to each answer; NaN if it gives no reward.
        total: the weighted sum of the rewards of each answer.
        names: the names of the F reward functions.
        scored: from `RolloutPrograms.log_probs`. With `reference_log_probs`, the metrics include
            `kl`, the k3 estimate in nats per token (Schulman 2020).
    """
    real, lengths = rollout.real, rollout.lengths
    columns = {"reward": total}
    columns |= {f"rewards/{name}/mean": rewards[:, i] for i, name in enumerate(names)}
    # Map the name of a metric to its values and a mask of the values to include in the mean.
    metrics = {name: (x, real & ~jnp.isnan(x)) for name, x in columns.items()}
    metrics["completions/mean_length"] = lengths, real
    metrics["completions/clipped_ratio"] = 1.0 - rollout.ended, real
    metrics["completions/mean_terminated_length"] = lengths, real & rollout.ended
    if "reference_log_probs" in scored:
        is_answer = rollout.loss_mask != 0
        difference = scored["reference_log_probs"] - scored["log_probs"]
        difference = jnp.where(is_answer, difference, 0.0)
        metrics["kl"] = jnp.exp(difference) - difference - 1, real[:, None] & is_answer
    return (
        {name: jnp.sum(jnp.where(counts, x, 0.0)) for name, (x, counts) in metrics.items()},
        {name: jnp.sum(counts).astype(jnp.float32) for name, (_, counts) in metrics.items()},
    )


def group_metrics(total: Float[Array, " R"], group_size: int) -> dict[str, Array]:
    """Returns metrics of how much rewards vary among the answers to a prompt, named as in TRL."""
    # The reward of a single answer cannot vary, so use the standard deviation over the batch.
    if group_size < 2:
        return {"reward_std": jnp.nanstd(total, ddof=1)}
    # Reshape [R] to [prompts, G], and compute a standard deviation for each group.
    spread = jnp.nanstd(total.reshape(-1, group_size), axis=1, ddof=1)
    return {
        "reward_std": jnp.nanmean(spread),
        "frac_reward_zero_std": jnp.mean((jnp.nan_to_num(spread) < 1e-8).astype(jnp.float32)),
    }


def take_rows(batch: dict[str, Array], rows: Int[Array, " M"], mesh: Mesh) -> dict[str, Array]:
    """Selects rows of a batch by their indices, and shards them like a batch."""
    by_row = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    return {
        name: jax.lax.with_sharding_constraint(jnp.take(x, rows, axis=0), by_row)
        for name, x in batch.items()
    }
