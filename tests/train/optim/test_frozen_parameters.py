"""What the patterns of `optimizer.frozen` stand for; test_optimizer.py has what freezing does."""

import dataclasses

import jax
import numpy as np
import pytest
from flaxzoo.train.optim.optimizer import make_optimizer, trained_factors
from flaxzoo.train.optimizer_config import OptimizerConfig
from flaxzoo.train.state import init_state
from jax.tree_util import keystr

CONFIG = OptimizerConfig(peak_learning_rate=0.1, schedule="constant")
LAYERS = 3


def linear(*shape):
    return {"kernel": np.ones((*shape, 4)), "bias": np.ones((*shape[:-1], 4))}


def norm(*shape):
    return {"scale": np.ones((*shape, 4)), "bias": np.ones((*shape, 4))}


PARAMS = {
    "token_embedding": {"embedding": np.ones((7, 4))},
    "position_embedding": {"embedding": np.ones((5, 4))},
    "token_type_embedding": {"embedding": np.ones((2, 4))},
    "embedding_norm": norm(),
    "layers": {
        "attention": {"query": linear(LAYERS, 4), "output": linear(LAYERS, 4)},
        "attention_norm": norm(LAYERS),
    },
    "pooler": linear(4),
    "head": {"classifier": linear(4)},
}


def frozen_names(*patterns):
    """The frozen parameters, and those of which some layers are: `{name: layers}`."""
    factors = {
        keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree.leaves_with_path(trained_factors(PARAMS, patterns))
    }
    frozen = {name: np.flatnonzero(x == 0).tolist() for name, x in factors.items()}
    return {
        name: layers if name.startswith("layers/") else None
        for name, layers in frozen.items()
        if layers
    }


QUERY = ("layers/attention/query/bias", "layers/attention/query/kernel")
IN_LAYERS = (
    *QUERY,
    "layers/attention/output/bias",
    "layers/attention/output/kernel",
    "layers/attention_norm/bias",
    "layers/attention_norm/scale",
)


def in_layers(names, layers):
    return dict.fromkeys(names, layers)


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["token_embedding"], {"token_embedding/embedding": None}),
        (["token_embedding/embedding"], {"token_embedding/embedding": None}),
        (
            [".*embedding.*"],
            {
                "token_embedding/embedding": None,
                "position_embedding/embedding": None,
                "token_type_embedding/embedding": None,
                "embedding_norm/scale": None,
                "embedding_norm/bias": None,
            },
        ),
        (["layers/0"], in_layers(IN_LAYERS, [0])),
        (["layers/[01]"], in_layers(IN_LAYERS, [0, 1])),
        (
            ["layers/0", "layers/2/attention/query"],
            {**in_layers(IN_LAYERS, [0]), **in_layers(QUERY, [0, 2])},
        ),
        (["layers/[0-5]"], in_layers(IN_LAYERS, [0, 1, 2])),
        (["layers"], in_layers(IN_LAYERS, [0, 1, 2])),
        (["layers/attention/query"], in_layers(QUERY, [0, 1, 2])),
        (["layers/1/attention/query/kernel"], {QUERY[1]: [1]}),
        (["(?i)POOLER"], {"pooler/kernel": None, "pooler/bias": None}),
        (["head/classifier/bias|pooler/bias"], {"head/classifier/bias": None, "pooler/bias": None}),
    ],
)
def test_what_patterns_freeze(patterns, frozen):
    assert frozen_names(*patterns) == frozen


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("token_embeddings", "did you mean token_embedding"),
        ("embedding", "did you mean "),  # no part of a name fits
        ("layers/3", "did you mean layers/"),
        ("head/bias", "did you mean head"),
        ("zzz", "choose from embedding_norm, head, layers, pooler, position_embedding, token_emb"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_similar_paths(pattern, hint):
    tx = make_optimizer(dataclasses.replace(CONFIG, frozen=("pooler", pattern)), 10)
    with pytest.raises(ValueError, match=f"optimizer.frozen '{pattern}' .*: {hint}"):
        jax.eval_shape(lambda: init_state(PARAMS, tx))


def test_a_model_without_trained_parameters_is_refused():
    tx = make_optimizer(dataclasses.replace(CONFIG, frozen=("layers", "[^l].*")), 10)
    with pytest.raises(ValueError, match=r"optimizer.frozen layers \[\^l\].\* .*every"):
        tx.init(PARAMS)
