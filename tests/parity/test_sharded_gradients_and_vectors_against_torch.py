"""Every family on eight devices, and the vectors of texts, against transformers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data.tokenizers.characters import CharacterTokenizer
from flaxzoo.models.text.embed import TextEmbedder, TextRow
from flaxzoo.train.distributed.expert_parallel import over_mesh

from ..models.hf import test_bart, test_decoders, test_t5
from ..support import marian
from ..support.hf_weights import gradients_of
from ..support.parity import difference_of_trees, note_answers, note_gradients
from . import test_bert_against_torch as encoders

torch = pytest.importorskip("torch")

# Each of the two axes that divide parameters has two devices.
V, EVEN = 40, {"decoder_attention_heads": 4}
DENSE = train.MeshConfig(data=2, fsdp=2, tensor=2)
OF_EXPERTS = train.MeshConfig(data=1, fsdp=2, expert=2, tensor=2)
DECODERS = {family: kind for kind, (family, _) in reversed(test_decoders.KINDS.items())} | {
    "Falcon": "Falcon, groups"  # the first kind has one key head, which two devices cannot divide
}
"""A family of transformers → one of its kinds of models."""
DIVISIBLE = {"Bloom": {"n_head": 4}, "Mixtral": {"num_local_experts": 4}}


def decoder(family):
    grouped = "num_key_value_heads" not in test_decoders.OTHER_SIZES.get(family, ())
    fields = {"num_key_value_heads": 2} if grouped else {}
    fields |= DIVISIBLE.get(family, {})
    return test_decoders.random_model(DECODERS[family], "ForCausalLM", vocab_size=V, **fields)


EMBEDDING = {
    **{
        family: functools.partial(encoders.make, family, "masked_lm", vocab_size=V)
        for family in encoders.FAMILIES
    },
    **{family: functools.partial(decoder, family) for family in DECODERS},
}
"""A family of transformers that embeds texts → a function that makes a random model."""
MADE = EMBEDDING | {
    **{
        family: functools.partial(test_t5.made, family, vocab_size=V, num_heads=4)
        for family in ("T5", "MT5")
    },
    **{
        family: functools.partial(test_bart.made, family, vocab_size=V, **EVEN)
        for family in ("Bart", "MBart", "Pegasus")
    },
    "Marian": functools.partial(marian.make, vocab_size=V, pad_token_id=V - 1, **EVEN),
}
"""The same for all families, also those with a decoder behind an encoder."""
RNG = np.random.default_rng(0)
IDS, TARGET = RNG.integers(4, V - 1, (8, 12)), RNG.integers(4, V - 1, (8, 8))


@pytest.fixture(scope="module", params=MADE)
def pair(request, tmp_path_factory):
    """A random model of transformers, and the same model loaded from its folder."""
    theirs = MADE[request.param]()
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    return theirs.eval(), *models.load(folder)


@pytest.mark.slow
def test_gradients_on_eight_devices(pair):
    theirs, model, params = pair
    config = model.config
    mesh = train.make_mesh(OF_EXPERTS if config.num_experts else DENSE)
    sharded = jax.device_put(params, train.parameter_shardings(params, mesh, config))
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(sharded))
    given = {"input_ids": IDS}
    if config.head == "seq2seq_lm":
        given["decoder_input_ids"] = TARGET
        if hasattr(theirs, "final_logits_bias"):
            theirs.final_logits_bias.requires_grad_()
    apply = over_mesh(model.apply, mesh, config)

    @jax.jit
    @jax.grad
    def gradient(params, given):
        return jnp.mean(jnp.square(apply({"params": params}, **given).logits))

    found = gradient(sharded, train.shard_batch(given, mesh))
    theirs(**{name: torch.tensor(x) for name, x in given.items()}).logits.square().mean().backward()
    expected = gradients_of(theirs, config)
    assert difference_of_trees(found, expected) < 1e-5
    note_gradients(theirs, "devices", found, expected)


@pytest.mark.parametrize("pair", EMBEDDING, indirect=True)
def test_vectors(pair):
    """Compares rows with padding with the mean of each row without padding."""
    theirs, model, params = pair
    embedder = TextEmbedder(model, params, CharacterTokenizer.train(["ab"]))
    rows = [ids[:length] for ids, length in zip(IDS, (12, 3, 7, 12), strict=False)]
    found = embedder.vectors([TextRow(row.tolist()) for row in rows])
    with torch.no_grad():
        expected = [
            theirs.base_model(torch.tensor(row[None])).last_hidden_state[0].mean(0) for row in rows
        ]
    expected = torch.stack(expected).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    note_answers(theirs, "vectors", found, expected)
