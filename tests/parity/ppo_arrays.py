"""Makes ppo_arrays.npz, what TRL 1.12.0 computes in a step of PPO on a tiny GPT-2.

Later versions of TRL have no PPO. Run, with trl==1.12.0, torch and transformers installed:

    python -m tests.parity.ppo_arrays

Policy and value share their body, as in this project: the value model is given the policy's. The
answers are fixed; two of them end early.
"""

import tempfile
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from flaxzoo import models
from flaxzoo.models.hf.save_weights import write_weights

FILE = Path(__file__).with_name("ppo_arrays.npz")
V, PROMPT, ANSWER, ROWS = 23, 4, 6, 8
PAD, END = V - 2, V - 1
SIZES = {"vocab_size": V, "max_length": PROMPT + ANSWER, "num_layers": 2, "d_model": 8}
CONFIG = models.GPTConfig(**SIZES, num_heads=2)
SETTINGS = {"beta": 0.3, "gamma": 0.95, "gae_lambda": 0.9, "penalty": 0.5, "temperature": 0.8}
RATE = 0.05


def perturbed(seed):
    """Returns parameters that are far enough from zero for gradients to differ."""
    params = models.init_params(models.create(CONFIG), jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    noisy = [np.asarray(x) + 0.2 * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(tree, noisy)


def main():
    """Runs two passes of one step, and writes what it computed."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        GPT2ForSequenceClassification,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    folder = Path(tempfile.mkdtemp())
    loaded = []
    for name, seed in (("policy", 0), ("reference", 5), ("reward", 9)):
        (folder / name).mkdir()
        write_weights(folder / name, CONFIG, perturbed(seed))
        loaded.append(GPT2LMHeadModel.from_pretrained(folder / name))
    policy, reference, judge = loaded
    torch.manual_seed(0)
    scorers = []
    for body in (policy, judge):
        config = body.config.__class__(**{**body.config.to_dict(), "num_labels": 1})
        config.pad_token_id = PAD
        scorer = cast(Any, GPT2ForSequenceClassification(config))
        scorer.transformer = body.transformer
        scorers.append(scorer)
    value, reward = scorers
    torch.nn.init.normal_(value.score.weight, std=0.5)
    torch.nn.init.normal_(reward.score.weight, std=0.5)

    rng = np.random.default_rng(3)
    prompts = rng.integers(0, PAD, (ROWS, PROMPT))
    answers = rng.integers(0, PAD, (ROWS, ANSWER))
    answers[1, 2] = answers[4, 0] = answers[6, ANSWER - 1] = answers[7, ANSWER - 2] = END
    order: list[np.ndarray] = []
    kept: dict[str, Any] = {}

    def fixed(model, queries, *_):
        rows = [next(i for i, p in enumerate(prompts) if (p == q).all()) for q in queries.numpy()]
        order.append(np.asarray(rows))
        whole = torch.cat([queries, torch.tensor(answers[rows])], 1)
        logits = ppo_trainer.forward(model, whole, PAD).logits[:, PROMPT - 1 : -1]
        return whole, logits / (SETTINGS["temperature"] + 1e-7)

    get_reward, masked_whiten = ppo_trainer.get_reward, ppo_trainer.masked_whiten

    def noted_reward(model, *args):
        found = get_reward(model, *args)
        if model is reward:
            kept["scores"] = found[1].detach().numpy().copy()
        return found

    def noted_whiten(values, mask, shift_mean=True):
        whitened = masked_whiten(values, mask, shift_mean)
        kept["raw_advantages"] = values.numpy().copy()
        kept["advantages"] = torch.where(mask, whitened, 0).numpy().copy()
        return whitened

    ppo_trainer.batch_generation = fixed
    ppo_trainer.get_reward, ppo_trainer.masked_whiten = noted_reward, noted_whiten
    words = Tokenizer(WordLevel({str(i): i for i in range(V)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=str(PAD), eos_token=str(END), padding_side="left"
    )
    args = PPOConfig(
        output_dir=str(folder / "out"),
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=ROWS,
        total_episodes=ROWS,
        num_ppo_epochs=2,
        num_sample_generations=0,
        response_length=ANSWER,
        kl_coef=SETTINGS["beta"],
        gamma=SETTINGS["gamma"],
        lam=SETTINGS["gae_lambda"],
        missing_eos_penalty=SETTINGS["penalty"],
        temperature=SETTINGS["temperature"],
        stop_token="eos",
        save_strategy="no",
    )
    trainer = PPOTrainer(
        args,
        tokenizer,
        policy,
        reference,
        reward,
        Dataset.from_dict({"input_ids": prompts.tolist()}),
        value,
    )
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=RATE)
    trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
    passes: list[dict[str, np.ndarray]] = []
    backward = trainer.accelerator.backward

    def noted_backward(loss):
        before = state_of(policy, value)
        backward(loss)
        gradient = {
            name: x.grad.numpy().copy() for name, x in named(policy, value) if x.grad is not None
        }
        passes.append({"loss": loss.detach().numpy().copy(), **before})
        passes[-1] |= {f"gradient/{name}": x for name, x in gradient.items()}

    trainer.accelerator.backward = noted_backward
    trainer.log = lambda metrics, *_: kept.update(
        {f"metrics/{name}": np.asarray(x) for name, x in metrics.items() if "/" in name}
    )
    trainer.train()
    (rows,) = order
    stored = {
        "prompts": prompts[rows],
        "answers": answers[rows],
        **{f"reference/{name}": x.detach().numpy() for name, x in reference.named_parameters()},
        **kept,
        **{f"{i}/{name}": x for i, found in enumerate(passes) for name, x in found.items()},
    }
    np.savez_compressed(FILE, **cast(Any, stored))
    print(
        f"{FILE.name}: {FILE.stat().st_size:,} bytes, losses {[float(p['loss']) for p in passes]}"
    )


def named(policy, value):
    """Returns the parameters that are trained, each once."""
    return [*policy.named_parameters(), ("score.weight", value.score.weight)]


def state_of(policy, value):
    """Returns copies of the parameters."""
    return {name: x.detach().numpy().copy() for name, x in named(policy, value)}


if __name__ == "__main__":
    main()
