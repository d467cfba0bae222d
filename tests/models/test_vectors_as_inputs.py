"""Vectors in place of tokens: the same model, gradients, and graphs by a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import data, models


@pytest.mark.parametrize("family", ["gpt", "bert", "llama"])
def test_the_vectors_of_tokens_give_the_outputs_of_these_tokens(tiny, assert_close, family):
    head = {"head": "none"} if family == "bert" else {}
    made = tiny(family=family, **head)
    ids = np.array([[3, 1, 4, 1], [5, 9, 2, 6]])
    table = made.params["token_embedding"]["embedding"]
    expected = made.model.apply({"params": made.params}, input_ids=ids).last_hidden_state

    def output(vectors):
        return models.apply_to_vectors(made.model, made.params, vectors).last_hidden_state

    assert_close(output(table[ids]), expected)
    assert (np.abs(jax.grad(lambda x: output(x)[:, -1].sum())(table[ids])).max(-1) > 0).all()
    with pytest.raises(data.UserError, match=r"embeddings must be \[B, T, "):
        output(table[ids][..., :3])


def test_a_graph_is_a_mask_that_says_which_nodes_attend_to_which():
    """Three nodes in a chain 0 - 1 - 2: after one layer node 0 knows nothing of node 2."""
    sizes = {"vocab_size": 1, "max_length": 3, "d_model": 8, "num_heads": 2, "num_token_types": 0}
    edges = np.array([[[1, 1, 0], [1, 1, 1], [0, 1, 1]]], bool)
    nodes = jax.random.normal(jax.random.key(0), (1, 3, 8))
    changed = nodes.at[0, 2].add(jnp.arange(8.0))
    for num_layers, reached in ((1, False), (2, True)):
        config = models.LectureBertConfig(
            **sizes, num_layers=num_layers, positions="none", head="none", body_pooler=False
        )
        model = models.create(config)
        params = models.init_params(model, jax.random.key(1))
        one, other = (
            models.apply_to_vectors(model, params, x, attention_mask=edges).last_hidden_state
            for x in (nodes, changed)
        )
        assert (np.abs(one - other)[0, 0].max() > 1e-6) == reached
        assert np.abs(one - other)[0, 1].max() > 1e-6


def test_an_encoder_decoder_is_refused(tiny):
    made = tiny(family="transformer")
    with pytest.raises(data.UserError, match="got an encoder-decoder"):
        models.apply_to_vectors(made.model, made.params, jnp.zeros((1, 2, 16)))
