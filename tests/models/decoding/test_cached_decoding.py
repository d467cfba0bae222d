"""What is decoded piece by piece from a cache is the full pass, in every causal model."""

import numpy as np
import pytest
from flaxzoo import models

IDS = np.random.default_rng(0).integers(0, 29, (3, 12))
MODELS = {
    "gpt-banded": {"local_window": 3},
    "gpt-sinusoidal": {"positions": "sinusoidal"},
    "gpt-scaled": {"scale_scores_by_layer": True, "tie_output": False},
    "gpt-primer": {
        "family": "lecture_gpt",
        "head_convolution": 3,
        "d_k": 3,
        "d_v": 5,
        "residual_scalar": True,
    },
    "bert": {"family": "bert", "head": "causal_lm"},
    "roberta": {"family": "roberta", "head": "causal_lm"},
    "electra": {"family": "electra", "head": "causal_lm"},
}
LAYERS = ("scan", "unroll", "separate")
GPT_RUNS = [
    *((name, layers) for name in ("gpt-banded", "gpt-primer") for layers in LAYERS),
    ("gpt-sinusoidal", "scan"),
    ("gpt-scaled", "scan"),
]
BERT_RUNS = [(name, layers) for name in ("bert", "roberta") for layers in LAYERS]
BERT_RUNS += [("electra", "scan")]


@pytest.mark.parametrize(("name", "layers"), GPT_RUNS)
@pytest.mark.parametrize("chunks", [(5, *[1] * 7), (4, 4, 4)], ids=str)
def test_pieces_are_the_full_pass(tiny, assert_close, name, layers, chunks):
    model = tiny(layers=layers, **MODELS[name])
    cache = models.init_cache(model.config, model.execution, 3, 14)
    logits, start = [], 0
    for n in chunks:
        out = model(input_ids=IDS[:, start : start + n], cache=cache)
        logits.append(np.asarray(out.logits))
        cache, start = out.cache, start + n
    assert int(cache.index) == 12
    assert_close(np.concatenate(logits, axis=1), model.logits(input_ids=IDS))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [*GPT_RUNS, *BERT_RUNS])
def test_left_padded_prompts_are_the_full_pass(tiny, assert_close, name, layers):
    model, lengths = tiny(layers=layers, **MODELS[name]), (7, 2, 7)
    mask = (np.arange(13) >= 7 - np.array(lengths)[:, None]).astype(int)
    prompt = np.full((3, 7), 28)
    for row, n in enumerate(lengths):
        prompt[row, 7 - n :] = IDS[row, :n]
    cache = models.init_cache(model.config, model.execution, 3, 13)
    out = model(input_ids=prompt, attention_mask=mask, cache=cache)
    logits = [np.asarray(out.logits)]
    for i in range(5):
        following = np.array([[IDS[row, n + i]] for row, n in enumerate(lengths)])
        out = model(input_ids=following, attention_mask=mask, cache=out.cache)
        logits.append(np.asarray(out.logits))
    decoded = np.concatenate(logits, axis=1)
    for row, n in enumerate(lengths):
        alone = model.logits(input_ids=IDS[row : row + 1, : n + 5])
        assert_close(decoded[row, 7 - n :], alone[0])
