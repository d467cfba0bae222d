"""The reinforcement-learning step: samples answers, rewards them, and trains on them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ....data.chat.policy import PolicyData, PolicyExamples
from ....data.common.errors import StepNotTaken
from ....data.tokenizers.base import Tokenizer
from ....models.adapters.lora import lora_of
from ....models.nn.typing import Array, Float, Params
from ....models.registry import create
from ...config import TrainConfig
from ...distributed.expert_parallel import over_mesh
from ...distributed.multiprocess import barrier
from ...distributed.sharding import (
    batch_sharding,
    check_batch,
    has_virtual_devices,
    process_shard,
    shard_batch,
)
from ...evaluation.reward_model import RewardModel
from ...evaluation.score_policy import ends_of_answers, evaluation_key
from ...losses.eval_step import EvaluatedBatch
from ...losses.objective import Objective
from ...objectives.online import OnlineConfig
from ...optim.schedules import make_schedule
from ...rewards.functions import RewardFunction, Rewards, rewards_of
from ...runs.run_folder import Run
from ...state import Metrics, TrainState
from ..compile import CompiledTrainer, NumpyBatch, step_of_run, trainer_of
from ..memory_summary import BatchShapes
from ..sharded_step import ShardedStep, run_keys, with_batch_sharding
from ..train_step import divide
from .rollout import (
    Rollout,
    RolloutPrograms,
    group_metrics,
    rollout_metrics,
    take_rows,
    weighted_rewards,
)
from .update import update_config

PROMPT = ("prompt_ids", "prompt_mask")
"""The names of the prompt arrays, each `[B, P]`."""


@dataclasses.dataclass
class PolicyTrainer:
    """Samples and rewards answers, and trains the policy on them with a compiled update.

    A step depends only on the state, the prompts and the seed. The sampled answers do not depend on
    the number of devices or on earlier samples.
    """

    config: TrainConfig
    """The configuration of the run."""
    objective: OnlineConfig
    sharded: ShardedStep
    """The compiled update. `compile` chooses the candidate of the update that fits into memory."""
    programs: RolloutPrograms
    tokenizer: Tokenizer
    rewards: Rewards
    training: PolicyExamples
    validation: PolicyExamples

    def __post_init__(self) -> None:
        mesh, inner = self.sharded.mesh, update_config(self.config, self.objective)
        self._update, self._schedule = (
            self.sharded.step,
            make_schedule(inner.optimizer, inner.steps, inner.schedule_start),
        )
        step_rng = run_keys(self.config.seed)[1]
        self._sample_key, self._update_key = (jax.random.fold_in(step_rng, i) for i in range(2))
        # Replicate the answers of evaluations, because each process computes metrics from all
        # answers.
        replicated = NamedSharding(mesh, PartitionSpec())
        self._sample = jax.jit(self.programs.sample, static_argnames="group_size")
        self._score = jax.jit(self._scored)
        self._judge = jax.jit(self._judged, out_shardings=replicated)
        self._take = jax.jit(functools.partial(take_rows, mesh=mesh))
        self._replicate = jax.jit(lambda x: x, out_shardings=replicated)

    def step(self, state: TrainState, batch: NumpyBatch) -> tuple[TrainState, Metrics]:
        """Samples answers to a batch of prompts, and makes one or more updates with these answers.

        Args:
            state: the state, whose memory is donated.
            batch: the prompts, as arrays `[B, …]`.

        Raises:
            StepNotTaken: a reward function failed; `state` is unchanged.
        """
        # Derive the key from the step number alone, so that a resumed run samples the same answers.
        step = int(state.step)
        rollout = self._sample(
            state.params,
            state.frozen,
            self._placed(batch),
            jax.random.fold_in(self._sample_key, step),
            group_size=self.objective.num_generations,
        )
        # The reward functions run on the host, between two compiled programs.
        rewards = self._rewards(rollout, batch, self.training)
        rows, metrics = self._score(state.params, state.frozen, rollout, rewards)
        collected: list[Metrics] = []
        for update, part in enumerate(self._mini_batches(rows, step)):
            if update:  # only the first update counts as a step of the run
                state = dataclasses.replace(state, step=state.step - 1)
            key = jax.random.fold_in(self._update_key, update)
            state, metrics_of_update = self._update(state, part, key)
            collected.append(metrics_of_update)
            # Virtual CPU devices may deadlock if several programs run at once.
            if has_virtual_devices():
                jax.block_until_ready(metrics_of_update)
        means = _mean(collected)
        # The learning-rate schedule counts updates, so log the rate of the step's last update.
        rate = jnp.asarray(self._schedule((step + 1) * len(collected) - 1))
        return state, {**means, **metrics, "learning_rate": rate}

    def _placed(self, batch: NumpyBatch, *more: str) -> dict[str, Array]:
        prompts = {name: batch[name] for name in (*PROMPT, *more)}
        return shard_batch(prompts, self.sharded.mesh)

    def _rewards(
        self, rollout: Rollout, batch: NumpyBatch, examples: PolicyExamples
    ) -> Float[Array, "R F"]:
        """Returns the rewards of this process's answers; NaN for filler rows or missing rewards.

        Raises:
            StepNotTaken: a reward function failed in this or another process.
        """
        texts, real = self._texts(rollout)
        group = len(texts) // len(batch["index"])
        epochs, indices = (np.repeat(batch[name], group).tolist() for name in ("epoch", "index"))
        # A reward model runs on all processes together. A process that has only filler rows must
        # therefore also call the reward functions, and passes its first row.
        judged = [i for i, is_real in enumerate(real) if is_real] or [0]
        prompts = [examples.prompts.prompt(epochs[i], indices[i]) for i in judged]
        values = np.full((len(texts), len(self.rewards.functions)), np.nan, np.float32)
        try:
            with barrier():
                values[judged] = self.rewards(prompts, [texts[i] for i in judged])
        except Exception as error:
            raise StepNotTaken from error
        # Discard the reward of a filler row.
        values[~np.asarray(real)] = np.nan
        return shard_batch({"rewards": values}, self.sharded.mesh)["rewards"]

    def _texts(self, rollout: Rollout) -> tuple[list[str], list[bool]]:
        """Returns the texts of this process's answers, and whether each is real (not filler)."""
        part, parts = process_shard(self.sharded.mesh)
        arrays = rollout.labels, rollout.loss_mask, rollout.real
        ids, answer, real = map(np.asarray, self._replicate(arrays))
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
        """Returns the arrays that the updates train on, and the metrics of the rollout."""
        objective, mesh = self.objective, self.sharded.mesh
        total, scored = self._total(rollout, rewards), {}
        if objective.needs_log_probs:
            has_reference = objective.beta > 0
            scored = self.programs.log_probs(params, frozen, rollout, reference=has_reference)
        batch = {**rollout.batch, **objective.targets(total, rollout.loss_mask, scored)}
        if objective.mask_truncated:
            # Exclude answers without an end token from the loss.
            masks = list(filter(batch.__contains__, ("loss_mask", "value_mask")))
            batch |= {name: batch[name] * rollout.ended[:, None] for name in masks}
        batch = {
            name: jax.lax.with_sharding_constraint(x, batch_sharding(mesh, x.shape))
            for name, x in batch.items()
        }
        return batch, {
            **divide(*self._sums(rollout, rewards, total, scored)),
            **group_metrics(total, objective.num_generations),
            **objective.rollout_metrics(total, rollout.loss_mask, scored, ended=rollout.ended),
        }

    def _total(self, rollout: Rollout, rewards: Float[Array, "R F"]) -> Float[Array, " R"]:
        """Returns each answer's weighted reward, minus the penalty for a missing end token."""
        total = weighted_rewards(rewards, self.rewards.weights)
        return total - self.objective.missing_end_penalty * ~rollout.ended

    def _sums(
        self,
        rollout: Rollout,
        rewards: Float[Array, "R F"],
        total: Float[Array, " R"],
        scored: Mapping[str, Array],
    ) -> tuple[Metrics, Metrics]:
        """Returns the sum and the count of each metric of a rollout."""
        return rollout_metrics(rollout, rewards, total, list(self.rewards.functions), scored)

    def _mini_batches(self, rows: dict[str, Array], step: int) -> list[dict[str, Array]]:
        """Returns the mini-batches of a step. If there are several, the rows are shuffled."""
        parts, iterations = self.objective.num_mini_batches, self.objective.num_iterations
        if parts == 1:
            return [rows] * iterations
        num_rows = next(iter(rows.values())).shape[0]
        # Each pass over the answers shuffles them again.
        rng = np.random.default_rng([self.config.seed, step])
        orders = [rng.permutation(num_rows) for _ in range(iterations)]
        return [
            self._take(rows, chosen.astype(np.int32))
            for order in orders
            for chosen in np.split(order, parts)
        ]

    def evaluate(self, state: TrainState, batch: NumpyBatch) -> EvaluatedBatch:
        """Samples an answer to each prompt of a batch, with the same keys in every evaluation.

        Returns:
            The sum and the count of each metric, and the answers with their rewards.
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
        # An evaluation needs log-probabilities only for the metric `kl`.
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
        prompts = with_batch_sharding({name: batch[name] for name in PROMPT}, mesh)
        group = self.objective.num_generations
        key = jax.eval_shape(lambda: self._sample_key)
        sample = functools.partial(self.programs.sample, group_size=group)
        # Trace sampling and scoring from shapes alone, to get the shapes of an update's batch.
        rollout = jax.eval_shape(sample, state.params, state.frozen, prompts, key)
        num_rows = rollout.real.shape[0]
        rewards = jax.ShapeDtypeStruct((num_rows, len(self.rewards.functions)), np.float32)
        rows, _ = jax.eval_shape(self._scored, state.params, state.frozen, rollout, rewards)
        size = num_rows // self.objective.num_mini_batches
        part = {
            name: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for name, x in rows.items()
        }
        # Use the candidate that fits into memory.
        chosen, program = self.sharded.compile(with_batch_sharding(part, mesh))
        self._update = chosen.step
        return program, self.sharded.change_to(chosen)


@jax.jit
def _mean(parts: Sequence[Metrics]) -> Metrics:
    """Returns the mean of each metric, computed by a single compiled program."""
    return jax.tree.map(lambda *x: sum(x) / len(x), *parts)


VALIDATION = Objective(
    coefficients={"reward": -1.0},
    inputs=lambda batch: {},
    counts=lambda batch: {},
    terms=lambda outputs, batch: {},
)
"""The objective of evaluations; its loss is the negated mean reward."""


def compile_policy_trainer(
    run: Run, objective: Objective, own_rewards: Sequence[RewardFunction] = ()
) -> CompiledTrainer:
    """Makes the functions that run reinforcement learning on the current devices.

    Args:
        run: the run, with an online objective.
        objective: the objective that defines the loss of a batch of answers.
        own_rewards: reward functions that the caller passed, in addition to the configured rewards.

    Raises:
        UserError: the batch or the parameters do not fit the mesh, a reward is unknown, or the
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
    # Rollouts use XLA attention, because the other attention kernels do not read a KV cache.
    # Rollouts have no backward pass, so they need no remat.
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
            adapter=lora_of(config.lora, model),
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
