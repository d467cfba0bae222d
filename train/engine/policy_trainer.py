"""A reinforcement-learning step: sample answers, reward them, update on them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...data.chat.policy import PolicyData, PolicyExamples
from ...data.common.errors import StepNotTaken
from ...data.tokenizers.base import Tokenizer
from ...models.adapters.lora import make_lora
from ...models.nn.typing import Array, Float, Key, Params
from ...models.registry import create
from ..config import TrainConfig
from ..distributed.expert_parallel import over_mesh
from ..distributed.multiprocess import barrier
from ..distributed.sharding import (
    batch_sharding,
    check_batch,
    has_virtual_devices,
    process_shard,
    shard_batch,
)
from ..evaluation.reward_model import RewardModel
from ..evaluation.score_policy import ends_of_answers, evaluation_key
from ..losses.eval_step import EvaluatedBatch
from ..losses.objective import Objective
from ..objectives.online import OnlineConfig
from ..optim.schedules import make_schedule
from ..rewards.functions import RewardFunction, Rewards, rewards_of
from ..runs.run_folder import Run
from ..state import Metrics, TrainState
from .compile import (
    CompiledTrainer,
    NumpyBatch,
    ShardedStep,
    run_keys,
    step_of_run,
    trainer_of,
    with_shardings,
)
from .memory_summary import BatchShapes
from .policy_update import update_config
from .rollout import (
    Rollout,
    RolloutPrograms,
    completion_metrics,
    divergence_metrics,
    group_metrics,
    reward_metrics,
    take_rows,
    weighted_rewards,
)


@dataclasses.dataclass
class PolicyTrainer:
    """Reinforcement learning with a compiled update.

    A step is a function of the state, the prompts and the seed: rollouts depend neither on the
    number of devices nor on earlier samples.
    """

    config: TrainConfig
    """The configuration of the run."""
    objective: OnlineConfig
    sharded: ShardedStep
    """The update; `compile` may replace it by one that needs less memory."""
    programs: RolloutPrograms
    tokenizer: Tokenizer
    rewards: Rewards
    training: PolicyExamples
    validation: PolicyExamples

    @functools.cached_property
    def _keys(self) -> tuple[Key[Array, ""], Key[Array, ""]]:
        """The keys of sampling and of updates."""
        step_rng = run_keys(self.config.seed)[1]
        return jax.random.fold_in(step_rng, 0), jax.random.fold_in(step_rng, 1)

    @functools.cached_property
    def _sample(self) -> Any:
        return jax.jit(self.programs.sample, static_argnames="group_size")

    @functools.cached_property
    def _score(self) -> Any:
        return jax.jit(self._scored)

    @functools.cached_property
    def _judge(self) -> Any:
        # Replicated, because each process reads all answers, as in any evaluation.
        return jax.jit(self._judged, out_shardings=self._whole)

    @functools.cached_property
    def _take(self) -> Any:
        return jax.jit(functools.partial(take_rows, mesh=self.sharded.mesh))

    @functools.cached_property
    def _replicate(self) -> Any:
        return jax.jit(lambda x: x, out_shardings=self._whole)

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.sharded.mesh, PartitionSpec())

    @functools.cached_property
    def _schedule(self) -> Any:
        inner = update_config(self.config, self.objective)
        return make_schedule(inner.optimizer, inner.steps)

    def step(self, state: TrainState, batch: NumpyBatch) -> tuple[TrainState, Metrics]:
        """Samples answers to a batch of prompts and takes the updates of a step.

        Args:
            state: the state, which is consumed.
            batch: prompts, arrays `[B, …]`.

        Raises:
            StepNotTaken: a reward failed; `state` is unchanged.
        """
        sample_key, update_key = self._keys
        # Keys depend on the step number alone, so that a resumed run samples the same answers.
        number = int(state.step)
        rollout = self._sample(
            state.params,
            state.frozen,
            self._placed(batch),
            jax.random.fold_in(sample_key, number),
            group_size=self.objective.num_generations,
        )
        # Rewards run on the host, between two compiled programs.
        rewards = self._rewards(rollout, batch, self.training)
        rows, metrics = self._score(state.params, state.frozen, rollout, rewards)
        collected: list[Metrics] = []
        for update, part in enumerate(self._mini_batches(rows, number)):
            if update:  # all updates count as one step of the run
                state = dataclasses.replace(state, step=state.step - 1)
            state, found = self.sharded.step(state, part, jax.random.fold_in(update_key, update))
            collected.append(found)
            # Virtual CPU devices may deadlock with several programs in flight.
            if has_virtual_devices():
                jax.block_until_ready(found)
        means = _mean(collected)
        # The schedule counts updates: log the rate of the last one.
        rate = jnp.asarray(self._schedule((number + 1) * len(collected) - 1))
        return state, {**means, **metrics, "learning_rate": rate}

    def _placed(self, batch: NumpyBatch, *more: str) -> dict[str, Array]:
        prompts = {name: batch[name] for name in ("prompt_ids", "prompt_mask", *more)}
        return shard_batch(prompts, self.sharded.mesh)

    def _rewards(
        self, rollout: Rollout, batch: NumpyBatch, examples: PolicyExamples
    ) -> Float[Array, "R F"]:
        """Rewards the answers of this process on the host; NaN for filler and without a reward.

        Raises:
            StepNotTaken: a reward failed, on this or another process.
        """
        texts, real = self._texts(rollout)
        group = len(texts) // len(batch["index"])
        epochs, indices = (np.repeat(batch[name], group).tolist() for name in ("epoch", "index"))
        # A reward model needs all processes, so one with filler only rewards its first row.
        judged = [i for i, is_real in enumerate(real) if is_real] or [0]
        asked = [examples.prompts.prompt(epochs[i], indices[i]) for i in judged]
        values = np.full((len(texts), len(self.rewards.functions)), np.nan, np.float32)
        try:
            with barrier():
                values[judged] = self.rewards(asked, [texts[i] for i in judged])
        except Exception as error:
            raise StepNotTaken from error
        # Discard the reward of such a row.
        values[~np.asarray(real)] = np.nan
        return shard_batch({"rewards": values}, self.sharded.mesh)["rewards"]

    def _texts(self, rollout: Rollout) -> tuple[list[str], list[bool]]:
        """Returns the answers of this process as texts, and which of them are not filler."""
        part, parts = process_shard(self.sharded.mesh)
        held = (rollout.labels, rollout.loss_mask, rollout.real)
        ids, answer, real = map(np.asarray, self._replicate(held))
        # Take this process's share of the global rows.
        rows = len(ids) // parts
        local = slice(part * rows, (part + 1) * rows)
        ends = self.programs.end_ids
        texts = [
            self.tokenizer.decode([i for i in tokens[mask != 0].tolist() if i not in ends])
            for tokens, mask in zip(ids[local], answer[local], strict=True)
        ]
        return texts, real[local].tolist()

    def _scored(
        self,
        params: Params,
        frozen: Params | None,
        rollout: Rollout,
        rewards: Float[Array, "R F"],
    ) -> tuple[dict[str, Array], Metrics]:
        """Returns the batch of the updates, and the metrics of the rollout."""
        objective = self.objective
        total = self._total(rollout, rewards)
        scored = self._log_probs(params, frozen, rollout)
        batch = {**rollout.batch, **objective.targets(total, rollout.loss_mask, scored)}
        # Answers without an end token get no loss.
        if objective.mask_truncated:
            for name in ("loss_mask", "value_mask"):
                if name in batch:
                    batch[name] = batch[name] * rollout.ended[:, None]
        mesh = self.sharded.mesh
        batch = {
            name: jax.lax.with_sharding_constraint(x, batch_sharding(mesh, x.shape))
            for name, x in batch.items()
        }
        return batch, {
            **self._means(rollout, rewards, total, scored),
            **group_metrics(total, objective.num_generations),
            **objective.rollout_metrics(total, rollout.loss_mask, scored, ended=rollout.ended),
        }

    def _log_probs(
        self, params: Params, frozen: Params | None, rollout: Rollout
    ) -> dict[str, Array]:
        """Returns the log-probabilities that the objective needs, or an empty dict."""
        if not self.objective.needs_log_probs:
            return {}
        has_reference = self.objective.beta > 0
        return self.programs.log_probs(params, frozen, rollout, reference=has_reference)

    def _total(self, rollout: Rollout, rewards: Float[Array, "R F"]) -> Float[Array, " R"]:
        """Returns each answer's reward, minus the penalty if it has no end token."""
        penalty = self.objective.missing_end_penalty
        total = weighted_rewards(rewards, self.rewards.weights)
        return total - penalty * ~rollout.ended if penalty else total

    def _sums(
        self,
        rollout: Rollout,
        rewards: Float[Array, "R F"],
        total: Float[Array, " R"],
        scored: Mapping[str, Array],
    ) -> tuple[Metrics, Metrics]:
        """Returns sums and counts of all metrics of a rollout."""
        sums, counts = reward_metrics(rollout, rewards, total, list(self.rewards.functions))
        more = [completion_metrics(rollout)]
        if "reference_log_probs" in scored:
            more.append(
                divergence_metrics(rollout, scored["log_probs"], scored["reference_log_probs"])
            )
        for more_sums, more_counts in more:
            sums |= more_sums
            counts |= more_counts
        return sums, counts

    def _means(
        self,
        rollout: Rollout,
        rewards: Float[Array, "R F"],
        total: Float[Array, " R"],
        scored: Mapping[str, Array],
    ) -> Metrics:
        sums, counts = self._sums(rollout, rewards, total, scored)
        return {name: sums[name] / jnp.maximum(counts[name], 1) for name in sums}

    def _mini_batches(self, rows: dict[str, Array], step: int) -> list[dict[str, Array]]:
        """Returns the mini-batches of a step, shuffled by seed and step if there are several."""
        parts, iterations = self.objective.num_mini_batches, self.objective.num_iterations
        if parts == 1:
            return [rows] * iterations
        number = next(iter(rows.values())).shape[0]
        # Each pass over the rows has another order.
        rng = np.random.default_rng([self.config.seed, step])
        orders = [rng.permutation(number) for _ in range(iterations)]
        return [
            self._take(rows, chosen.astype(np.int32))
            for order in orders
            for chosen in np.split(order, parts)
        ]

    def evaluate(self, state: TrainState, batch: NumpyBatch) -> EvaluatedBatch:
        """Samples an answer to each prompt of a batch, with the same keys each time.

        Returns:
            Sums and counts of the metrics, and the answers with their rewards.
        """
        rollout = self._sample(
            state.params,
            state.frozen,
            self._placed(batch, "index"),
            evaluation_key(self.config.seed),
            group_size=1,
        )
        rewards = self._rewards(rollout, batch, self.validation)
        return self._judge(state.params, state.frozen, rollout, rewards)

    def _judged(
        self,
        params: Params,
        frozen: Params | None,
        rollout: Rollout,
        rewards: Float[Array, "R F"],
    ) -> EvaluatedBatch:
        total = self._total(rollout, rewards)
        # An evaluation needs log-probabilities for the divergence only.
        scored = {}
        if self.objective.beta:
            scored = self.programs.log_probs(params, frozen, rollout, reference=True)
        sums, counts = self._sums(rollout, rewards, total, scored)
        predictions = {
            "labels": rollout.labels,
            "answer_mask": rollout.loss_mask,
            "rewards": rewards,
            "reward": total,
        }
        return sums, counts, predictions

    def compile(self, batch: BatchShapes) -> tuple[jax.stages.Compiled, str]:
        """Compiles the update for prompts of these shapes."""
        mesh, state = self.sharded.mesh, self.sharded.state
        names = ("prompt_ids", "prompt_mask")
        prompts = with_shardings(
            {name: batch[name] for name in names},
            {name: batch_sharding(mesh, batch[name].shape) for name in names},
        )
        group = self.objective.num_generations
        key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
        sample = functools.partial(self.programs.sample, group_size=group)
        # Trace sampling and scoring by shape, to learn the shapes of an update's batch.
        rollout = jax.eval_shape(sample, state.params, state.frozen, prompts, key)
        number = rollout.real.shape[0]
        rewards = jax.ShapeDtypeStruct((number, len(self.rewards.functions)), np.float32)
        rows, _ = jax.eval_shape(self._scored, state.params, state.frozen, rollout, rewards)
        size = number // self.objective.num_mini_batches
        part = {
            name: jax.ShapeDtypeStruct(
                (size, *x.shape[1:]),
                x.dtype,
                sharding=batch_sharding(mesh, (size, *x.shape[1:])),
            )
            for name, x in rows.items()
        }
        # Replace the update by the candidate that fits into memory.
        chosen, program = self.sharded.compile(part)
        changed, self.sharded = chosen.change_from(self.sharded), chosen
        return program, changed


@jax.jit
def _mean(parts: Sequence[Metrics]) -> Metrics:
    """Returns the mean of each metric; compiled, as each sum would be a program."""
    return jax.tree.map(lambda *x: sum(x) / len(x), *parts)


VALIDATION = Objective(
    coefficients={"reward": -1.0},
    inputs=lambda batch: {},
    counts=lambda batch: {},
    terms=lambda outputs, batch: {},
)
"""The weights of an evaluation: its loss is the negated mean reward."""


def compile_policy_trainer(
    run: Run, objective: Objective, own_rewards: Sequence[RewardFunction] = ()
) -> CompiledTrainer:
    """Makes the functions of a reinforcement-learning run for the current devices.

    Args:
        run: the run, with an online objective.
        objective: what is learned from a batch of answers.
        own_rewards: the caller's rewards, in addition to the configured ones.

    Raises:
        UserError: mesh, batch and parameters do not fit each other, a reward is unknown, or the
          tokenizer has no token that ends an answer.
    """
    config, data = run.config, cast(PolicyData, run.config.data)
    settings = cast(OnlineConfig, config.objective)
    training = cast(PolicyExamples, run.train.examples)
    end_ids = ends_of_answers(run.tokenizer, training)
    # The compiled step is an update on a mini-batch of answers.
    inner = update_config(config, settings)
    sharded = step_of_run(inner, objective)
    mesh = sharded.mesh
    check_batch(mesh, config.batch_size, config.data.length)
    # Rollouts use XLA attention, because kernels do not read a cache. Without a backward pass they
    # need no remat.
    execution = dataclasses.replace(config.execution, attention="xla", remat="none")
    model = create(config.model, execution)
    trainer = PolicyTrainer(
        config=config,
        objective=settings,
        sharded=sharded,
        programs=RolloutPrograms(
            model=model,
            apply_fn=over_mesh(model.apply, mesh, model.config),
            mesh=mesh,
            temperature=settings.temperature,
            answer_length=settings.answer_length(data),
            end_ids=end_ids,
            num_parts=config.micro_batches * settings.num_mini_batches,
            adapter=None if config.lora is None else make_lora(config.lora, model),
        ),
        tokenizer=run.tokenizer,
        rewards=rewards_of(
            settings,
            own_rewards,
            open_model=functools.partial(RewardModel.of_run, mesh=mesh),
        ),
        training=training,
        validation=cast(PolicyExamples, run.validation.examples),
    )
    return dataclasses.replace(
        trainer_of(inner, sharded),
        step=trainer.step,
        compile=trainer.compile,
        evaluate=trainer.evaluate,
        validation=VALIDATION,
    )
