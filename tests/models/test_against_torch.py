"""The GPTs against tiny random models of transformers: logits, and every gradient."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.train.losses import cross_entropy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

V, P, L, D, N = 37, 16, 4, 24, 4
WINDOW = 5
SIZES = {"vocab_size": V, "max_length": P, "num_layers": L, "d_model": D, "num_heads": N}
SPECIAL = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager"}
BODY = {"n_positions": P, "n_embd": D, "n_layer": L, "n_head": N}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt():
    config = transformers.OpenAIGPTConfig(**BODY, **SPECIAL, **NO_DROPOUT)
    ours = models.GPTConfig(**SIZES, norm_position="post")
    return transformers.OpenAIGPTLMHeadModel(config), ours


def gpt2():
    config = transformers.GPT2Config(**BODY, **SPECIAL, **NO_DROPOUT)
    return transformers.GPT2LMHeadModel(config), models.GPTConfig(**SIZES)


def gpt_neo():
    config = transformers.GPTNeoConfig(
        hidden_size=D,
        num_layers=L,
        num_heads=N,
        max_position_embeddings=P,
        attention_types=[[["global", "local"], L // 2]],
        window_size=WINDOW,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
        **SPECIAL,
    )
    return transformers.GPTNeoForCausalLM(config), models.GPTConfig(**SIZES, local_window=WINDOW)


FAMILIES = {"gpt": gpt, "gpt2": gpt2, "gpt_neo": gpt_neo}


def make_pair(family):
    """A torch model with no parameter at its initial value, and our configuration of it."""
    torch.manual_seed(0)
    theirs, config = FAMILIES[family]()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return theirs.eval(), config


def converted(tensors):
    """Torch's parameters, or their gradients, as our stacked tree."""
    flat = {name.removeprefix("transformer."): np.asarray(x) for name, x in tensors.items()}
    below = [
        {name.removeprefix(f"h.{i}."): x for name, x in flat.items() if name.startswith(f"h.{i}.")}
        for i in range(L)
    ]
    tree = {
        "token_embedding": {"embedding": flat.get("wte.weight", flat.get("tokens_embed.weight"))},
        "position_embedding": {
            "embedding": flat.get("wpe.weight", flat.get("positions_embed.weight"))
        },
        "layers": jax.tree.map(lambda *x: np.stack(x), *map(layer, below)),
    }
    return {**tree, "final_norm": norm(flat, "ln_f")} if "ln_f.weight" in flat else tree


def layer(x):
    neo = "attn.attention.q_proj.weight" in x
    return {
        "attention": neo_attention(x) if neo else attention(x),
        "attention_norm": norm(x, "ln_1"),
        "feed_forward": {
            ours: {
                # GPT-Neo's are nn.Linear, transposed; the others are stored as ours.
                "kernel": x[f"{name}.weight"].T if neo else x[f"{name}.weight"],
                "bias": x[f"{name}.bias"],
            }
            for ours, name in (("up", "mlp.c_fc"), ("down", "mlp.c_proj"))
        },
        "feed_forward_norm": norm(x, "ln_2"),
    }


def norm(x, name):
    return {"scale": x[f"{name}.weight"], "bias": x[f"{name}.bias"]}


def attention(x):
    """Query, key and value are one projection of width 3 D."""
    kernels = np.split(x["attn.c_attn.weight"].reshape(D, 3 * N, D // N), 3, axis=1)
    biases = np.split(x["attn.c_attn.bias"].reshape(3 * N, D // N), 3)
    tree = {
        name: {"kernel": kernel, "bias": bias}
        for name, kernel, bias in zip(("query", "key", "value"), kernels, biases, strict=True)
    }
    output = x["attn.c_proj.weight"].reshape(N, D // N, D)
    return {**tree, "output": {"kernel": output, "bias": x["attn.c_proj.bias"]}}


def neo_attention(x):
    """Transposed matrices without biases, and scores that are not divided by the root of H."""
    tree = {
        name: {
            "kernel": x[f"attn.attention.{name[0]}_proj.weight"].T.reshape(D, N, D // N),
            "bias": np.zeros((N, D // N), np.float32),
        }
        for name in ("query", "key", "value")
    }
    tree["query"]["kernel"] = tree["query"]["kernel"] * np.float32(math.sqrt(D / N))
    output = x["attn.attention.out_proj.weight"].T.reshape(N, D // N, D)
    return {**tree, "output": {"kernel": output, "bias": x["attn.attention.out_proj.bias"]}}


def parameters(theirs):
    return {name: x.detach() for name, x in theirs.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family):
    theirs, config = make_pair(family)
    ids = np.random.default_rng(0).integers(0, V, (3, P))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)).logits.numpy()
    model, params = models.create(config), converted(parameters(theirs))
    template = jax.eval_shape(model.init, jax.random.key(0), input_ids=jnp.zeros((1, 1), int))
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, template["params"])
    logits = jax.jit(model.apply)({"params": params}, input_ids=ids).logits
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt", "gpt2"])
def test_every_gradient(family):
    theirs, config = make_pair(family)
    rng = np.random.default_rng(1)
    ids, labels = rng.integers(0, V, (2, 3, P))
    weights = (np.arange(P) < np.array([[P], [P - 3], [5]])).astype(np.float32)

    targets = torch.from_numpy(np.where(weights > 0, labels, -100))
    logits = theirs(torch.from_numpy(ids)).logits
    expected_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected_loss.backward()
    expected = converted({name: x.grad for name, x in theirs.named_parameters()})

    model = models.create(config)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(params):
        projection = model.apply({"params": params}, input_ids=ids).projection
        entropy = cross_entropy(projection, jnp.asarray(labels), jnp.asarray(weights))
        return entropy.loss / weights.sum()

    loss, gradient = loss_and_gradient(converted(parameters(theirs)))
    np.testing.assert_allclose(loss, expected_loss.item(), rtol=1e-6)
    for (path, ours), (_, torchs) in zip(
        jax.tree.leaves_with_path(gradient), jax.tree.leaves_with_path(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(ours, torchs, rtol=1e-5, atol=1e-6, err_msg=name)
