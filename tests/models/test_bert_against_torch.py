"""BERT, RoBERTa and DistilBERT against tiny random models of transformers, head by head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.train.losses import cross_entropy, softmax_cross_entropy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

V, P, L, D, N, F = 37, 16, 3, 24, 4, 40
LABELS = ("red", "green", "blue")
SIZES = {
    "vocab_size": V,
    "max_length": P,
    "num_layers": L,
    "d_model": D,
    "num_heads": N,
    "d_ff": F,
}
FAMILIES = {
    "Bert": {},
    "Roberta": {"position_offset": 2, "num_token_types": 1, "norm_eps": 1e-5},
    "DistilBert": {"num_token_types": 0, "pooler_activation": "relu"},
}
HEADS = {  # our head: the end of their class's name
    "none": "Model",
    "pretraining": "ForPreTraining",
    "masked_lm": "ForMaskedLM",
    "next_sentence": "ForNextSentencePrediction",
    "sequence": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "span": "ForQuestionAnswering",
    "choice": "ForMultipleChoice",
    "causal_lm": "ForCausalLM",
}
ONLY_BERT = ("pretraining", "next_sentence")
CASES = [
    *(("Bert", head) for head in HEADS),
    *(("Roberta", head) for head in HEADS if head not in ONLY_BERT),
    *(("DistilBert", head) for head in HEADS if head not in (*ONLY_BERT, "causal_lm")),
]


def torch_config(family, head):
    if family == "DistilBert":
        sizes = {"dim": D, "n_layers": L, "n_heads": N, "hidden_dim": F, "dropout": 0.0}
        other = {"attention_dropout": 0.0, "seq_classif_dropout": 0.0, "qa_dropout": 0.0}
    else:
        sizes = {
            "hidden_size": D,
            "num_hidden_layers": L,
            "num_attention_heads": N,
            "intermediate_size": F,
        }
        other = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if family == "Roberta":
        other |= {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
    if head == "causal_lm":
        other["is_decoder"] = True
    return getattr(transformers, f"{family}Config")(
        vocab_size=V,
        max_position_embeddings=P + FAMILIES[family].get("position_offset", 0),
        num_labels=2 if head == "span" else len(LABELS),
        pad_token_id=1,
        attn_implementation="eager",
        **sizes,
        **other,
    )


def make_pair(family, head):
    """A torch model with no parameter at its initial value, and our configuration of it."""
    torch.manual_seed(0)
    name: str = family + HEADS[head]
    cls = getattr(transformers, "BertLMHeadModel" if name == "BertForCausalLM" else name)
    theirs = cls(torch_config(family, head))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return theirs.eval(), models.BertConfig(**SIZES, **FAMILIES[family], head=head, labels=LABELS)


PREFIXES = ("bert.", "roberta.", "distilbert.")
# What DistilBERT calls differently.
DISTIL = {
    "attention.q_lin": "attention.self.query",
    "attention.k_lin": "attention.self.key",
    "attention.v_lin": "attention.self.value",
    "attention.out_lin": "attention.output.dense",
    "sa_layer_norm": "attention.output.LayerNorm",
    "ffn.lin1": "intermediate.dense",
    "ffn.lin2": "output.dense",
    "output_layer_norm": "output.LayerNorm",
    "transformer.layer": "encoder.layer",
}
# Wherever a family keeps it: our place of a part of a head, and theirs.
PARTS = {
    "pooler": ("pooler.dense", "pre_classifier", "classifier.dense"),
    "head/transform": (
        "cls.predictions.transform.dense",
        "lm_head.dense",
        "vocab_transform",
    ),
    "head/transform_norm": (
        "cls.predictions.transform.LayerNorm",
        "lm_head.layer_norm",
        "vocab_layer_norm",
    ),
    "head/bias": ("cls.predictions", "lm_head", "vocab_projector"),
    "head/next_sentence": ("cls.seq_relationship", "cls"),
    "head/classifier": ("classifier", "classifier.out_proj"),
    "head/span": ("qa_outputs",),
}


def converted(tensors, template):
    """Torch's parameters, or their gradients, as our tree; each of theirs is used."""
    flat = {}
    for name, x in tensors.items():
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        for theirs, usual in DISTIL.items():
            name = name.replace(theirs, usual) if "vocab" not in name else name
        flat[name] = np.asarray(x)
    used = set()

    def take(name):
        used.add(name)
        return flat[name]

    def linear(name, kernel_shape=None, bias_shape=None):
        kernel, bias = take(f"{name}.weight").T, take(f"{name}.bias")
        kernel = kernel.reshape(kernel_shape or kernel.shape)
        return {"kernel": kernel, "bias": bias.reshape(bias_shape or bias.shape)}

    def norm(name):
        return {"scale": take(f"{name}.weight"), "bias": take(f"{name}.bias")}

    def layer(i):
        at, heads = f"encoder.layer.{i}", (N, D // N)
        attention = {
            name: linear(f"{at}.attention.self.{name}", (D, *heads), heads)
            for name in ("query", "key", "value")
        }
        attention["output"] = linear(f"{at}.attention.output.dense", (*heads, D))
        return {
            "attention": attention,
            "attention_norm": norm(f"{at}.attention.output.LayerNorm"),
            "feed_forward": {
                "up": linear(f"{at}.intermediate.dense"),
                "down": linear(f"{at}.output.dense"),
            },
            "feed_forward_norm": norm(f"{at}.output.LayerNorm"),
        }

    def embedding(name):
        return {"embedding": take(f"embeddings.{name}_embeddings.weight")}

    def part(path):
        name = next((n for n in PARTS[path] if f"{n}.bias" in flat), None)
        if name is None:  # DistilBERT's body alone has no pooler
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), template[path])
        if path == "head/bias":
            return take(f"{name}.bias")
        return norm(name) if path.endswith("norm") else linear(name)

    tree = {
        "token_embedding": embedding("word"),
        "position_embedding": embedding("position"),
        "embedding_norm": norm("embeddings.LayerNorm"),
        "layers": jax.tree.map(lambda *x: np.stack(x), *map(layer, range(L))),
    }
    if "token_type_embedding" in template:
        tree["token_type_embedding"] = embedding("token_type")
    if "pooler" in template:
        tree["pooler"] = part("pooler")
    if "head" in template:
        tree["head"] = {name: part(f"head/{name}") for name in template["head"]}
    assert used == flat.keys(), flat.keys() - used
    assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, template)
    return tree


def parameters(theirs):
    return {name: x.detach() for name, x in theirs.named_parameters()}


def inputs(family, head):
    """Three rows, one of them full, padded on the right; in some heads of two choices."""
    rng = np.random.default_rng(0)
    shape = (3, 2, P) if head == "choice" else (3, P)
    lengths = np.array([P, 9, 4]).reshape(3, *[1] * (len(shape) - 1))
    ids = rng.integers(2, V, shape)
    mask = (np.arange(P) < np.broadcast_to(lengths, shape)).astype(np.int64)
    # RoBERTa's positions are counted by the padding id.
    given = {"input_ids": np.where(mask, ids, 1), "attention_mask": mask}
    if family == "Bert":
        given["token_type_ids"] = rng.integers(0, 2, shape)
    return given


def ours_of(family, head, theirs, config):
    model = models.create(config)
    template = jax.eval_shape(lambda: models.init_params(model, jax.random.key(0)))
    return model, converted(parameters(theirs), template)


NAMES = {
    "none": ("last_hidden_state", "pooler_output"),
    "pretraining": ("prediction_logits", "seq_relationship_logits"),
    "span": ("start_logits", "end_logits"),
}


@pytest.mark.parametrize(("family", "head"), CASES)
def test_answers(family, head):
    theirs, config = make_pair(family, head)
    given = inputs(family, head)
    with torch.no_grad():
        expected = theirs(**{name: torch.from_numpy(x) for name, x in given.items()})
    model, params = ours_of(family, head, theirs, config)
    output = jax.jit(model.apply)({"params": params}, **given)
    real = given["attention_mask"] == 1
    for name in NAMES.get(head, ("logits",)):
        if name == "pooler_output" and family == "DistilBert":
            continue
        wanted, ours = getattr(expected, name).numpy(), np.asarray(getattr(output, name))
        assert wanted.shape == ours.shape
        assert np.abs(wanted).max() > 0.1
        if wanted.shape[:2] == real.shape:  # what padding answers is nobody's business
            wanted, ours = wanted[real], ours[real]
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("head", ["pretraining", "masked_lm"])
def test_every_gradient(head):
    """Of masked words, gathered, and next sentences: against torch's labels of -100."""
    theirs, config = make_pair("Bert", head)
    given = inputs("Bert", head)
    rng = np.random.default_rng(1)
    positions = np.stack([rng.permutation(4)[:3] for _ in range(3)])
    weights = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    positions, words = positions * weights, rng.integers(0, V, (3, 3))
    labels = np.full((3, P), -100)
    for row, place, word in zip(*np.nonzero(weights), words[weights == 1], strict=True):
        labels[row, positions[row, place]] = word
    continues = np.array([0, 1, 1])

    targets = {"labels": torch.from_numpy(labels)}
    if head == "pretraining":
        targets["next_sentence_label"] = torch.from_numpy(continues)
    expected_loss = theirs(**{k: torch.from_numpy(x) for k, x in given.items()}, **targets).loss
    expected_loss.backward()
    model, params = ours_of("Bert", head, theirs, config)
    gradients = {name: x.grad for name, x in theirs.named_parameters()}
    expected = converted(gradients, params)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(params):
        output = model.apply({"params": params}, **given, masked_positions=positions)
        assert output.projection.hidden.shape == (3, 3, D)
        masked = cross_entropy(
            output.projection, jnp.asarray(words), jnp.asarray(weights, jnp.float32)
        )
        loss = masked.loss / weights.sum()
        if head == "pretraining":
            logits = output.seq_relationship_logits
            loss += softmax_cross_entropy(logits, jnp.asarray(continues), jnp.ones(3)).loss / 3
        return loss

    loss, gradient = loss_and_gradient(params)
    np.testing.assert_allclose(loss, expected_loss.item(), rtol=1e-6)
    for (path, ours), (_, torchs) in zip(
        jax.tree.leaves_with_path(gradient), jax.tree.leaves_with_path(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        # A relative part beside it: some gradients are in the tens.
        np.testing.assert_allclose(ours, torchs, rtol=1e-5, atol=1e-5, err_msg=name)


def test_dropout_stands_where_the_original_has_it():
    def places(head):
        config = models.BertConfig(**SIZES, head=head, labels=LABELS)
        model = models.create(config)
        params = models.init_params(model, jax.random.key(0))
        shape = (2, 1, 5) if head == "choice" else (2, 5)
        rng = models.row_keys(jax.random.key(1), 2)

        def forward(params, rng):
            output = model.apply({"params": params}, np.zeros(shape, int), rng=rng)
            return jax.tree.leaves(output)

        return str(jax.make_jaxpr(forward)(params, rng)).count("name=dropout_mask")

    # Embeddings; in the one traced layer attention weights and two outputs; classifiers.
    counts = {head: places(head) for head in HEADS}
    with_dropout = {"sequence", "choice", "token"}
    assert counts == {head: 5 if head in with_dropout else 4 for head in HEADS}
