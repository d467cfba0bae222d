"""Names of options in other libraries and programs, and the equivalent options of flaxzoo.

This file imports only the standard library, because options are read before other modules are
imported.
"""

import difflib
from collections.abc import Sequence

from ...data.common.errors import similar_names

FAMILIAR_NAMES: dict[str, str] = {
    familiar: ours
    for ours, names in {
        "optimizer.peak-learning-rate": "lr learning-rate max-lr peak-lr",
        "optimizer.final-fraction": "min-lr",
        "optimizer.schedule": "lr-scheduler-type lr-scheduler",
        "optimizer.warmup-steps": "warmup num-warmup-steps warmup-iters",
        "optimizer.warmup-fraction": "warmup-ratio",
        "optimizer.name": "optim optimizer",
        "optimizer.weight-decay": "wd",
        "optimizer.beta1": "adam-beta1",
        "optimizer.beta2": "adam-beta2",
        "optimizer.epsilon": "adam-epsilon",
        "optimizer.max-gradient-norm": "max-grad-norm grad-clip gradient-clip-val",
        "epochs": "num-epochs num-train-epochs max-epochs",
        "steps": "max-steps num-steps max-iters max-train-steps",
        "batch-size": "train-batch-size per-device-train-batch-size bs",
        "micro-batches": "gradient-accumulation-steps accumulate-grad-batches",
        "workdir": "output-dir out-dir save-dir run-name",
        "lora.rank": "lora-r lora-rank",
        "lora.alpha": "lora-alpha",
        "lora.dropout-rate": "lora-dropout",
        "lora.targets": "lora-target-modules target-modules",
        "lora.also-trained": "modules-to-save lora-modules-to-save",
        "num-return-sequences": "num-samples num-best n",
        "stop-strings": "stop",
        "assistant-model": "draft draft-model",
        "num-assistant-tokens": "draft-tokens num-draft-tokens",
        "run": "model",
        "init-from": "model-name-or-path model-name pretrained checkpoint",
        "resume": "resume-from-checkpoint",
        "preset": "config-name model-type",
        "data.length": "max-seq-length max-seq-len max-length seq-len "
        "seq-length sequence-length block-size context-length",
        "data.source": "train-file dataset dataset-name data",
        "data.validation": "validation-file eval-file",
        "data.tokenizer.path": "tokenizer tokenizer-name",
        "execution.dtype bfloat16": "fp16 bf16",
        "execution.dtype": "precision dtype",
        "execution.remat full": "gradient-checkpointing",
        "checkpoint-every": "save-steps",
        "evaluate-every": "eval-steps eval-interval",
        "log-every": "logging-steps log-interval",
        "keep-last": "save-total-limit",
        "data.num-workers": "dataloader-num-workers num-workers",
        "objective.gae-lambda": "objective.lam objective.lambda lam",
        "objective.beta": "kl-coef",
        "objective.loss-type": "loss-type",
        "objective.label-smoothing": "label-smoothing label-smoothing-factor",
        "objective.centering": "center-rewards-coefficient",
        "model.num-layers": "num-layers n-layer num-hidden-layers",
        "model.num-heads": "n-head num-attention-heads",
        "model.d-model": "n-embd hidden-size",
        "model.d-ff": "intermediate-size",
        "model.dropout-rate": "dropout",
        "wandb-project": "report-to",
        "max-new-tokens": "max-tokens length",
        "temperature": "temp",
        "num-beams": "beam beams beam-size",
        "top-k": "topk",
        "top-p": "topp",
        "input": "file input-file",
        "query-file": "queries",
        "prompt-file": "prompts prompts-file",
        "output": "output-file o",
    }.items()
    for familiar in names.split()
}
"""Maps option names of other libraries and programs to the equivalent option of flaxzoo."""


def flag_of(name: str) -> str:
    """Returns the option that sets a field; for example, `--top-k` for the field `top_k`."""
    return f"--{name.replace('_', '-')}"


def remedy_for(name: str, known: Sequence[str]) -> str:
    """Returns a suggestion for an unknown option, to append to a message. It may be empty.

    Args:
        name: the option, with or without dashes.
        known: the valid options, with dashes.
    """
    plain = name.lstrip("-").replace("_", "-").lower()
    familiar = FAMILIAR_NAMES.get(plain, "")
    if f"--{familiar.split(' ')[0]}" in known:
        return f": here it is --{familiar}"
    section, dot, last = plain.rpartition(".")
    ends = {flag: flag.lstrip("-").rpartition(".")[2] for flag in known}
    near = difflib.get_close_matches(last, ends.values(), n=1, cutoff=0.8)
    # Prefer options with a similar last part over options with a similar whole name.
    similar = [flag for flag in known if ends[flag] in near] or similar_names(f"--{plain}", known)
    # Put options of the same section first.
    similar = sorted(similar, key=lambda flag: flag != f"--{section}{dot}{ends[flag]}")[:2]
    return f": did you mean {' or '.join(similar)}?" if similar else ""
