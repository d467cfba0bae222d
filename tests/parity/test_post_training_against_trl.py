"""Losses of post-training and their gradients against TRL, on a tiny GPT-2 and fixed batches."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.models.hf.save_weights import write_weights

from ..support.hf_weights import gradients_of
from ..support.stated_table import check_row

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # TRL

GUIDE, HEADING = "docs/explain/losses.md", "loss and gradient"
V, T, PROMPT, PAIRS, ROWS = 31, 14, 5, 3, 6
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "max_length": T,
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 2,
}
SIZES["dropout_rate"] = 0.0  # the train step would drop


def perturbed(config, seed):
    model = models.create(config)
    params = models.init_params(model, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [x + 0.2 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return model, jax.tree.unflatten(tree, noisy)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Our model, its parameters, those of a reference, and both as folders for transformers."""
    config = models.GPTConfig(**SIZES)
    model, params = perturbed(config, 0)
    reference = perturbed(config, 7)[1]
    folders = []
    for name, own in (("policy", params), ("reference", reference)):
        folders.append(tmp_path_factory.mktemp(name))
        write_weights(folders[-1], config, own)
    return model, params, reference, folders


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(V - 2)} | {"<pad>": V - 2, "<eos>": V - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>"
    )


def ids_and_mask(rng, *shape):
    """Prompts of PROMPT tokens and answers of 2 to T - PROMPT; int32 `[*shape, T]`."""
    lengths = rng.integers(PROMPT + 2, T + 1, shape)
    mask = (np.arange(T) < lengths[..., None]).astype(np.int32)
    return (rng.integers(0, V - 2, (*shape, T)) * mask).astype(np.int32), mask


def labels_of(ids, mask):
    """The label of each token, and where it belongs to the answer; the last token has none."""
    labels, real = np.roll(ids, -1, -1), np.roll(mask, -1, -1)
    answer = (np.arange(T) >= PROMPT - 1) & (np.arange(T) < T - 1) & (real != 0)
    return labels * (np.arange(T) < T - 1), answer.astype(np.int32)


def ours(objective, model, params, batch, frozen=None):
    """The loss of a whole batch, and its gradient."""

    def loss(params, batch):
        _, sums = objective.apply(model.apply, params, batch, frozen=frozen)
        counts = objective.counts(batch)
        return sum(c * sums[n] / counts[n] for n, c in objective.coefficients.items())

    return jax.jit(jax.value_and_grad(loss))(params, batch)


def on_eight_devices(objective, model, params, batch, frozen=None):
    """The same by the train step in two micro-batches on a mesh of eight devices."""
    mesh = train.make_mesh(train.MeshConfig(data=4, fsdp=2))
    sharded = train.make_sharded_step(model, objective, optax.sgd(1.0), mesh, num_micro_batches=2)
    state = jax.tree.map(  # without a program that draws parameters
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), sharded.state
    )
    shardings = jax.tree.map(lambda x: x.sharding, state.params)

    def placed(params):  # a copy, because the step consumes its state
        return jax.device_put(jax.tree.map(np.array, params), shardings)

    kept = None if frozen is None else placed(frozen)
    state = dataclasses.replace(state, params=placed(params), frozen=kept)
    # Rows of zeros fill the batch up, and count nowhere.
    filled = {
        name: np.concatenate([x, np.zeros((16 - len(x), *x.shape[1:]), x.dtype)])
        for name, x in batch.items()
    }
    placed = train.shard_batch(filled, mesh)
    after, metrics = sharded.step(state, placed, jax.random.key(1))
    gradient = jax.tree.map(
        lambda old, new: np.asarray(old) - np.asarray(new), params, after.params
    )
    return metrics["loss"], gradient


def packed_rows(batch):
    """The same examples, several in a row: `[ROWS / 2, 2T]`, none of them padded apart."""
    packed = {
        name: np.zeros((ROWS // 2, 2 * T), np.int32)
        for name in ("input_ids", "labels", "segment_ids", "position_ids", "loss_mask")
    }
    for row in range(ROWS):
        length = int(batch["segment_ids"][row].sum())
        used = int((packed["segment_ids"][row // 2] != 0).sum())
        span = slice(used, used + length)
        for name in ("input_ids", "labels", "loss_mask"):
            packed[name][row // 2, span] = batch[name][row, :length]
        packed["segment_ids"][row // 2, span] = row % 2 + 1
        packed["position_ids"][row // 2, span] = np.arange(length)
    return packed


def assert_as(theirs, loss, config, name, *found):
    """Compares losses and the gradients of every parameter, and the row of the guide.

    Args:
        theirs: the model of torch.
        loss: its loss.
        config: our model's configuration.
        name: the row of the guide's table.
        *found: our loss and gradient, computed in several ways; None for a way that is not.
    """
    theirs.zero_grad()
    loss.backward()
    expected = gradients_of(theirs, config)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    assert largest > 1e-3
    differences: list[float | None] = []
    for way in found:
        if way is None:
            differences.append(None)
            continue
        value, gradient = way
        np.testing.assert_allclose(value, loss.item(), rtol=1e-5, atol=1e-6)
        apart = jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), gradient, expected))
        difference = float(max(apart)) / max(1.0, float(largest))
        assert difference <= 1e-5
        differences.append(difference)
    if name:
        check_row(GUIDE, HEADING, name, differences)


def settings(cls, folder, **options):
    return cls(
        output_dir=str(folder),
        bf16=False,
        activation_checkpointing=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **options,
    )


def tensors(**arrays):
    return {name: torch.tensor(np.asarray(x)) for name, x in arrays.items()}


def test_supervised(policy, tokenizer, tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    model, params, _, (folder, _) = policy
    ids, mask = ids_and_mask(np.random.default_rng(0), ROWS)
    labels, answer = labels_of(ids, mask)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = Dataset.from_dict({"prompt": ["w1 w2"] * 2, "completion": [" w3 w4"] * 2})
    trainer = SFTTrainer(
        theirs, settings(SFTConfig, tmp_path), train_dataset=rows, processing_class=tokenizer
    )
    theirs.eval()
    masked = np.where((np.arange(T) >= PROMPT) & (mask != 0), ids, -100)
    given = tensors(input_ids=ids, attention_mask=mask, labels=masked)
    loss = trainer.compute_loss(theirs, given)
    batch = {"input_ids": ids, "labels": labels, "segment_ids": mask, "loss_mask": answer}
    case = train.supervised(), model, params, batch
    wider = models.create(dataclasses.replace(model.config, max_length=2 * T))
    table = params["position_embedding"]["embedding"]
    doubled = {"embedding": np.concatenate([table, np.zeros_like(table)])}
    packed = ours(case[0], wider, {**params, "position_embedding": doubled}, packed_rows(batch))
    in_wider = packed[1]["position_embedding"]["embedding"]
    packed[1]["position_embedding"] = {"embedding": in_wider[:T]}
    assert_as(
        theirs, loss, model.config, "`supervised`", ours(*case), packed, on_eight_devices(*case)
    )


@pytest.mark.parametrize("options", [{}, {"centering": 0.01}])
@pytest.mark.parametrize("with_margin", [False, True])
def test_reward(options, with_margin, tokenizer, tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer

    config = models.GPTConfig(**SIZES, head="sequence_classification", labels=("reward",))
    model, params = perturbed(config, 3)
    write_weights(tmp_path, config, params)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, pad_token_id=V - 2).eval()
    rng = np.random.default_rng(1)
    ids, mask = ids_and_mask(rng, PAIRS, 2)
    margin = rng.random(PAIRS).astype(np.float32)
    ids = np.where(mask, ids, V - 2).astype(np.int32)  # transformers finds the end by the pad token
    rows = Dataset.from_dict({"chosen": ["w1 w2"] * 2, "rejected": ["w3"] * 2})
    args = settings(RewardConfig, tmp_path, center_rewards_coefficient=options.get("centering"))
    trainer = RewardTrainer(theirs, args, train_dataset=rows, processing_class=tokenizer)
    theirs.eval()
    stacked: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    given = tensors(**{name: np.concatenate([x[:, 0], x[:, 1]]) for name, x in stacked.items()})
    if with_margin:
        given |= tensors(margin=margin)
        stacked["margin"] = margin
    loss = trainer.compute_loss(theirs, given)
    case = train.reward(train.RewardConfig(**options)), model, params, stacked
    everywhere = on_eight_devices(*case) if options and with_margin else None
    name = "`reward`" if everywhere is not None else ""
    assert_as(theirs, loss, config, name, ours(*case), None, everywhere)


@pytest.mark.parametrize("loss", ["sigmoid", "robust", "hinge", "ipo"])
def test_dpo(loss, policy, tokenizer, tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    model, params, reference, folders = policy
    ids, mask = ids_and_mask(np.random.default_rng(2), PAIRS, 2)
    ids[:, 1, :PROMPT] = ids[:, 0, :PROMPT]
    labels, answer = labels_of(ids, mask)
    theirs, frozen = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders)
    smoothing = 0.1 if loss == "robust" else 0.0
    rows = Dataset.from_dict({"prompt": ["w1"] * 2, "chosen": [" w2"] * 2, "rejected": [" w3"] * 2})
    args = settings(DPOConfig, tmp_path, loss_type=[loss], beta=0.3, label_smoothing=smoothing)
    trainer = DPOTrainer(theirs, frozen, args, train_dataset=rows, processing_class=tokenizer)
    theirs.eval()
    completion = ((np.arange(T) >= PROMPT) & (mask != 0)).astype(np.int32)
    stacked = {"input_ids": ids, "attention_mask": mask, "completion_mask": completion}
    given = tensors(**{name: np.concatenate([x[:, 0], x[:, 1]]) for name, x in stacked.items()})
    value = trainer.compute_loss(theirs, given)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask, "loss_mask": answer}
    options = {"beta": 0.3, "loss_type": loss, "label_smoothing": smoothing}
    in_each_step = train.dpo(train.DPOConfig(**options, reference="frozen"))
    in_step = ours(in_each_step, model, params, batch, frozen=reference)
    case = in_each_step, model, params, batch, reference
    assert_as(theirs, value, model.config, f"`dpo` {loss}", in_step, None, on_eight_devices(*case))

    # The same from stored log-probabilities of the reference.
    rows = {name: x.reshape(-1, T) for name, x in batch.items()}
    found = log_probs_of(model, reference, rows, 1.0).reshape(ids.shape)
    stored = np.sum(found * answer, axis=-1, dtype=np.float32)
    objective = train.dpo(train.DPOConfig(**options))
    precomputed = ours(objective, model, params, {**batch, "reference_log_probs": stored})
    np.testing.assert_allclose(precomputed[0], in_step[0], rtol=1e-5)


def policy_batch(seed):
    rng = np.random.default_rng(seed)
    ids, mask = ids_and_mask(rng, ROWS)
    labels, answer = labels_of(ids, mask)
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": mask,
        "loss_mask": answer,
        "advantages": rng.normal(size=ROWS).astype(np.float32),
    }


@functools.cache
def log_probs_by(model, temperature):
    def compute(params, ids, mask, labels):
        outputs = model.apply({"params": params}, input_ids=ids, attention_mask=mask)
        return train.token_log_probs(outputs.projection, labels, temperature=temperature).log_prob

    return jax.jit(compute)


def log_probs_of(model, params, batch, temperature):
    names = ("input_ids", "attention_mask", "labels")
    return np.asarray(log_probs_by(model, temperature)(params, *(batch[name] for name in names)))


def for_trl(batch):
    """Prompts and answers apart, the log-probabilities of the answers `[B, T - PROMPT]`."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    given = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": mask[:, :PROMPT],
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask[:, PROMPT:],
        "advantages": batch["advantages"],
        "num_items_in_batch": np.sum(batch["loss_mask"]),
    }
    for name, own in (("old_per_token_logps", "old"), ("ref_per_token_logps", "reference")):
        if f"{own}_log_probs" in batch:
            given[name] = batch[f"{own}_log_probs"][:, PROMPT - 1 : -1]
    return tensors(**given)


GRPO = [
    {"loss_type": "dapo"},
    {"loss_type": "grpo", "beta": 0.2},
    {"loss_type": "bnpo", "beta": 0.2, "correct_kl": False, "temperature": 0.7},
    {"loss_type": "dr_grpo", "epsilon": 0.1, "epsilon_high": 0.3},
    {"loss_type": "dapo", "importance": "sequence", "beta": 0.1},
]


@pytest.mark.parametrize("options", GRPO, ids=lambda options: "-".join(map(str, options.values())))
def test_grpo(options, policy, tokenizer, tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    model, params, reference, (folder, _) = policy
    temperature, beta = options.get("temperature", 1.0), options.get("beta", 0.0)
    batch = policy_batch(4)
    # An old policy that is near enough for some ratios to lie within the bounds.
    old = jax.tree.map(lambda a, b: 0.97 * a + 0.03 * b, params, reference)
    batch["old_log_probs"] = log_probs_of(model, old, batch, temperature)
    batch["reference_log_probs"] = log_probs_of(model, reference, batch, temperature)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    args = settings(
        GRPOConfig,
        tmp_path,
        loss_type=options["loss_type"],
        beta=beta,
        epsilon=options.get("epsilon", 0.2),
        epsilon_high=options.get("epsilon_high"),
        importance_sampling_level=options.get("importance", "token"),
        use_bias_correction_kl=options.get("correct_kl", True),
        temperature=temperature,
        max_completion_length=T - PROMPT,
        num_generations=2,
        per_device_train_batch_size=2,
    )
    trainer = GRPOTrainer(
        theirs,
        lambda completions, **_: [0.0] * len(completions),
        args,
        train_dataset=Dataset.from_dict({"prompt": ["w1"] * 2}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    theirs.eval()
    loss = trainer._compute_loss(theirs, for_trl(batch))
    own = train.GRPOConfig(**options, max_new_tokens=T - PROMPT)
    case = train.grpo(own), model, params, batch
    name = f"`grpo` {own.loss_type}{', by sequence' if own.importance == 'sequence' else ''}"
    assert_as(theirs, loss, model.config, name, ours(*case), None, on_eight_devices(*case))


def test_rloo(policy, tokenizer, tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.rloo_config import RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer

    model, params, reference, (folder, _) = policy
    batch = policy_batch(5)
    old = jax.tree.map(lambda a, b: 0.98 * a + 0.02 * b, params, reference)
    batch["old_log_probs"] = log_probs_of(model, old, batch, 1.0)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    args = settings(
        RLOOConfig, tmp_path, num_generations=2, per_device_train_batch_size=2, beta=0.0
    )
    trainer = RLOOTrainer(
        theirs,
        lambda completions, **_: [0.0] * len(completions),
        args,
        train_dataset=Dataset.from_dict({"prompt": ["w1"] * 2}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    theirs.eval()
    given = for_trl(batch)
    given["old_logps"] = torch.tensor(np.sum(batch["old_log_probs"] * batch["loss_mask"], axis=1))
    loss = trainer._compute_loss(theirs, given)
    case = train.rloo(), model, params, batch
    assert_as(theirs, loss, model.config, "`rloo`", ours(*case), None, on_eight_devices(*case))
