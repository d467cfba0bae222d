"""Generates greedy answers to validation prompts, to compare a model before and after training."""

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...data.chat.policy import PromptRecord
from ...data.chat.records import Demonstration, Preference, PromptedText
from ...data.common.progress import LogFn, ignore
from ...data.tokenizers.base import Tokenizer
from ...models.finite import load_finite
from ...models.heads.specs import CAUSAL_HEADS
from ...models.text.completions import Prompt
from ...models.text.generate import TextGenerator
from ..runs.samples import first_and_last, when
from .reward_model import RewardModel

NUM_PROMPTS = 2
NUM_TOKENS = 60
Rows = list[dict[str, Any]]
"""The rows for `runs.report.write_report`. Each row has a step, a prompt, a completion, and
possibly a reward."""


def answers_before_and_after(
    folders: Sequence[tuple[int, str | Path]], tokenizer: Tokenizer, records: Sequence[Any]
) -> Rows:
    """Returns the greedy answers of several models to the first `NUM_PROMPTS` prompts.

    Args:
        folders: the step and the folder of each model.
        tokenizer: the tokenizer of the run; all models use its chat template.
        records: demonstrations or preferences. For a preference, the chosen text is used.
    """
    contexts = [_better(record).without_answer() for record in records[:NUM_PROMPTS]]
    prompts = [PromptRecord(one, {}).encode(tokenizer) for one in contexts]
    inputs = [Prompt(prompt.text, ids=prompt.ids) for prompt in prompts]
    greatest = max(itertools.chain(*(prompt.ids for prompt in prompts)))
    rows: Rows = []
    for step, folder in folders:
        model, params = load_finite(folder)
        # Skip an initial model that cannot generate text (a reward model) or lacks tokens of the
        # chat template.
        if model.config.head not in CAUSAL_HEADS or greatest >= model.config.vocab_size:
            continue
        ends = {"eos_token_id": tokenizer.special_ids.eos}
        completed = TextGenerator(model, params, tokenizer, ends).complete(
            inputs, do_sample=False, max_new_tokens=NUM_TOKENS, log=ignore
        )
        rows += [
            {"step": step, "prompt": one.prompt.text, "completion": one.completions[0].text}
            for one in completed
        ]
    return rows


def rewards_of_pairs(step: int, folder: str | Path, pairs: Sequence[Preference]) -> Rows:
    """Returns the rewards of both texts in each of the first pairs."""
    texts = [text for pair in pairs[:NUM_PROMPTS] for text in (pair.chosen, pair.rejected)]
    contexts = [text.without_answer() for text in texts]
    completions = list(map(_answer, texts))
    rewards = RewardModel.of_run(folder)(contexts, completions)
    prompts = [" ".join(one.texts) for one in contexts]
    return [
        {"step": step, "prompt": prompt, "completion": answer, "reward": round(reward, 4)}
        for prompt, answer, reward in zip(prompts, completions, rewards, strict=True)
    ]


def log_rows(rows: Rows, log: LogFn) -> None:
    """Logs short lines for the first rows of the first and of the last step."""
    for step, of_step in first_and_last(rows).items():
        # The rows of a reward model are pairs of answers to each prompt.
        is_pair = len(of_step) > 1 and of_step[0]["prompt"] == of_step[1]["prompt"]
        for row in of_step[: 2 * NUM_PROMPTS if is_pair else NUM_PROMPTS]:
            reward = row.get("reward")
            end = "" if reward is None else f"; reward {reward:.4f}"
            log(f"{when(step)}: {_shown(row['prompt'])} → {_shown(row['completion'])}{end}")


def _shown(text: str) -> str:
    """Returns a text in one short line."""
    shortened = textwrap.shorten(text, 100)
    return repr(shortened) if shortened else "(white space)" if text else "(empty)"


def _better(record: Demonstration | Preference) -> Demonstration:
    return record.chosen if isinstance(record, Preference) else record


def _answer(text: Demonstration) -> str:
    """Returns the completion; for a conversation, the last message."""
    return text.completion if isinstance(text, PromptedText) else text.texts[-1]
