"""Losses of post-training and their gradients against TRL, on a tiny GPT-2 and fixed batches."""

from typing import Any

import jax
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.hf.save_weights import write_weights

from ..support.hf_weights import gradients_of

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # TRL

V, T, PROMPT, PAIRS, ROWS = 31, 14, 5, 3, 6
SIZES = {"vocab_size": V, "max_length": T, "num_layers": 2, "d_model": 16, "num_heads": 2}


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


def assert_as(theirs, loss, found, config):
    """Compares the loss and the gradient of every parameter."""
    value, gradient = found
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5, atol=1e-6)
    theirs.zero_grad()
    loss.backward()
    expected = gradients_of(theirs, config)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    assert largest > 1e-3

    def compare(a, b):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, largest))

    jax.tree.map(compare, gradient, expected)


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
    found = ours(train.supervised(), model, params, batch)
    assert_as(theirs, loss, found, model.config)


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
    found = ours(train.reward(**options), model, params, stacked)
    assert_as(theirs, loss, found, config)


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
    options = {"beta": 0.3, "loss": loss, "label_smoothing": smoothing}
    in_step = ours(
        train.dpo(**options, frozen_reference=True), model, params, batch, frozen=reference
    )
    assert_as(theirs, value, in_step, model.config)

    # The same from stored log-probabilities of the reference.
    rows = {name: x.reshape(-1, T) for name, x in batch.items()}
    found = log_probs_of(model, reference, rows, 1.0).reshape(ids.shape)
    stored = np.sum(found * answer, axis=-1, dtype=np.float32)
    precomputed = ours(
        train.dpo(**options), model, params, {**batch, "reference_log_probs": stored}
    )
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


def log_probs_of(model, params, batch, temperature):
    @jax.jit
    def compute(params, ids, mask, labels):
        outputs = model.apply({"params": params}, input_ids=ids, attention_mask=mask)
        return train.token_log_probs(outputs.projection, labels, temperature=temperature).log_prob

    names = ("input_ids", "attention_mask", "labels")
    return np.asarray(compute(params, *(batch[name] for name in names)))


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
    {"loss": "dapo"},
    {"loss": "grpo", "beta": 0.2},
    {"loss": "bnpo", "beta": 0.2, "correct_kl": False, "temperature": 0.7},
    {"loss": "dr_grpo", "epsilon": 0.1, "epsilon_high": 0.3},
    {"loss": "dapo", "importance": "sequence", "beta": 0.1},
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
        loss_type=options["loss"],
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
    own = dict(options)
    if own["loss"] == "dr_grpo":
        own["max_answer_length"] = T - PROMPT
    found = ours(train.grpo(**own), model, params, batch)
    assert_as(theirs, loss, found, model.config)


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
    found = ours(train.rloo(), model, params, batch)
    assert_as(theirs, loss, found, model.config)
