"""Three steps of fine-tuning a sequence classifier, against torch.

The other families have the layers of these, and `test_bert_against_torch.py` has their gradients.
transformers has no classifier of a Granite, so a Granite learns next tokens.
"""

import jax
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.train.engine.train_step import make_train_step
from flaxzoo.train.objectives.causal_lm import CAUSAL
from flaxzoo.train.objectives.classification import CLASSIFICATION
from flaxzoo.train.optim.optimizer import make_optimizer
from flaxzoo.train.optimizer_config import OptimizerConfig
from flaxzoo.train.state import init_state

from ..models.hf.test_decoders import random_model
from ..support.stated_table import check_row
from .test_bert_against_torch import FAMILIES, WITH_TYPES, make

torch = pytest.importorskip("torch")

ENCODERS = (
    *("XLMRoberta", "Camembert", "RobertaPreLayerNorm", "MPNet", "Electra", "ModernBert"),
    *("Deberta", "DebertaV2", "Albert", "NomicBert", "Gte"),
)
DECODERS = (
    *("OLMo 2", "OLMo 3", "SmolLM3", "StableLM", "Falcon", "Gemma3, two sides"),
    *("Phi-4-mini", "Granite"),
)
CAUSAL_LMS = ("Granite",)
OPTIONS = {
    # All rows are within the original length, as transformers chooses the factors by the longest.
    "Phi-4-mini": {"original_max_position_embeddings": 12},
    "StableLM": {"hidden_dropout": 0.0},  # torch and JAX draw other numbers
}
GUIDE, HEADING = "docs/train/fine-tune.md", "fine-tuning steps"
HEAD = "sequence_classification"
STEPS, RATE, DECAY = 3, 1e-3, 0.01
# A gradient that is 0 but for rounding, such as that of biases of keys, moves nothing.
EPSILON = 1e-6
RNG = np.random.default_rng(0)
LENGTHS = np.array([11, 7, 4, 9])
MASK = (np.arange(11) < LENGTHS[:, None]).astype(np.int64)
IDS = RNG.integers(3, 37, (STEPS, 4, 11))
LABELS = RNG.integers(0, 3, (STEPS, 4))


def batches(family, pad):
    for ids, labels in zip(IDS, LABELS, strict=True):
        batch = {"input_ids": np.where(MASK, ids, pad), "attention_mask": MASK, "labels": labels}
        types = {"token_type_ids": (ids % 2) * MASK} if family in WITH_TYPES else {}
        if family in CAUSAL_LMS:
            batch["labels"] = np.where(MASK, ids, -100)
        yield {**batch, **types}


def shifted(batch):
    """Our batch of next tokens for theirs; positions without a label have segment 0."""
    ids, real = batch["input_ids"], batch["attention_mask"]
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "segment_ids": real[:, 1:]}


def by_torch(theirs, given):
    """The loss and the global norm of the gradient of each step; updates the model."""
    # Norms and biases do not decay.
    groups = [
        {"params": [x for x in theirs.parameters() if (x.ndim > 1) == matrix], "weight_decay": rate}
        for matrix, rate in ((True, DECAY), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=EPSILON)
    for batch in given:
        optimizer.zero_grad()
        loss = theirs(**{name: torch.from_numpy(x) for name, x in batch.items()}).loss
        loss.backward()
        squares = [x.grad.square().sum() for x in theirs.parameters() if x.grad is not None]
        yield loss.item(), torch.stack(squares).sum().sqrt().item()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_three_steps(family, tmp_path):
    causal = family in CAUSAL_LMS
    suffix = "ForCausalLM" if causal else "ForSequenceClassification"
    theirs = (
        make(family, HEAD)
        if family in FAMILIES
        else random_model(family, suffix, num_labels=3, **OPTIONS.get(family, {}))
    )
    theirs.save_pretrained(tmp_path / "before")
    given = list(batches(family, theirs.config.pad_token_id))
    expected = list(by_torch(theirs, given))
    theirs.save_pretrained(tmp_path / "after")

    model, params = models.load(tmp_path / "before")
    config = OptimizerConfig(
        peak_learning_rate=RATE,
        schedule="constant",
        warmup_steps=0,
        beta2=0.999,
        epsilon=EPSILON,
        weight_decay=DECAY,
        max_gradient_norm=None,
    )
    tx = make_optimizer(config, STEPS)
    step = jax.jit(make_train_step(model.apply, CAUSAL if causal else CLASSIFICATION, tx))
    state = init_state(params, tx)
    measured = [0.0, 0.0]
    for batch, wanted in zip(given, expected, strict=True):
        ours = shifted(batch) if causal else batch
        state, metrics = step(state, ours, jax.random.key(0))
        found = metrics["loss"], metrics["gradient_norm"]
        apart = [abs(float(x) / y - 1) for x, y in zip(found, wanted, strict=True)]
        measured = np.maximum(measured, apart).tolist()  # a NaN stays
    assert measured[0] < 1e-5
    assert measured[1] < 1e-4
    _, after = models.load(tmp_path / "after")
    differences = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), state.params, after)
    measured.append(float(np.max(jax.tree.leaves(differences))))
    print(family, measured)
    assert measured[2] < 1e-4, differences
    check_row(GUIDE, HEADING, family, measured)
