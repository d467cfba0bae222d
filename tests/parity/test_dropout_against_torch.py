"""The tensors to which training applies dropout, and the rates, against transformers.

In both programs, dropout sets every third column of a tensor to 0 and divides the others by
1 - rate. Then the logits are equal only if the same rates apply to the same tensors.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.nn import dropout

from ..models.hf import test_decoders as decoders
from . import test_bert_against_torch as encoders

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEADS = (
    *("sequence_classification", "token_classification", "question_answering"),
    *("multiple_choice", "pretraining"),
)
ENCODERS = [case for case in encoders.CASES if case[1] in HEADS]
RATES = {
    **{"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
    **{"dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.2, "mlp_dropout": 0.3},
    **{"classifier_dropout": 0.4, "classifier_dropout_prob": 0.4, "summary_last_dropout": 0.4},
    **{"seq_classif_dropout": 0.4, "qa_dropout": 0.4},
}
"""Rates of the fields of all encoders."""
ATTENTION, CLASSIFIER = {"attention_dropout": 0.2}, {"classifier_dropout": 0.4}
OUTPUTS = {"hidden_dropout": 0.1}
WITHOUT_CLASSIFIER = ("OLMo 2", "OLMo 3", "Granite", "Phi-4-mini", "Gemma3, two sides")
DECODERS = (
    *((kind, "ForCausalLM", ATTENTION) for kind in WITHOUT_CLASSIFIER),
    # transformers applies no dropout to the attention weights of a Falcon without ALiBi.
    *((kind, "ForCausalLM", OUTPUTS) for kind in ("Falcon", "Falcon, groups")),
    *(
        (kind, "ForCausalLM", {**ATTENTION, **OUTPUTS})
        for kind in ("Falcon, ALiBi", "StableLM", "StableLM, parallel")
    ),
    ("Phi3", "ForCausalLM", {**ATTENTION, "resid_pdrop": 0.1}),
    *((kind, "ForTokenClassification", ATTENTION) for kind in ("SmolLM3", "StableLM")),
    *((kind, "ForTokenClassification", CLASSIFIER) for kind in ("SmolLM3", "StableLM", "Falcon")),
)
"""The kinds of models, their classes, and their rates; the other rates are the defaults."""


@pytest.fixture(autouse=True)
def drop_every_third_column(monkeypatch):
    def dropped(x, p=0.5, training=True, inplace=False):
        return x * (torch.arange(x.shape[-1]) % 3 != 1) / (1 - p) if training and p else x

    def attended(query, key, value, attn_mask: Any = None, dropout_p=0.0, is_causal=False):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -torch.inf)
        return dropped((scores + attn_mask).softmax(-1), dropout_p) @ value

    def kept(keys, num_rows, num_columns, rate):
        shape = (*keys.shape[:-1], num_rows, num_columns)
        return jnp.broadcast_to(jnp.arange(num_columns) % 3 != 1, shape)

    monkeypatch.setattr(torch.nn.functional, "dropout", dropped)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attended)
    monkeypatch.setattr(dropout, "kept_elements", kept)


def assert_same_logits(theirs, given: dict[str, Any], names: dict[str, str], folder):
    """Compares the logits of a model of transformers in training with ours.

    Args:
        names: The names of the logits in transformers, and in flaxzoo.
    """
    theirs.save_pretrained(folder)
    model, params = models.load(folder)
    keys = models.row_keys(jax.random.key(0), len(given["input_ids"]))
    ours = jax.jit(lambda params: model.apply({"params": params}, **given, rng=keys))(params)
    batch = encoders.as_torch(given)
    with torch.no_grad():
        trained, evaluated = theirs.train()(**batch), theirs.eval()(**batch)
    for name, other in names.items():
        found = np.asarray(getattr(ours, other))
        wanted, without = (x[name].numpy() for x in (trained, evaluated))
        if wanted.shape[:2] == given["attention_mask"].shape:
            real = given["attention_mask"] == 1
            found, wanted, without = (x[real] for x in (found, wanted, without))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5, err_msg=name)
        assert np.abs(wanted - without).max() > 1e-3


def _drop_outputs_of_layers(albert):
    """Applies the last dropout of each layer, which transformers creates and does not apply."""
    for layer in albert.modules():
        if hasattr(layer, "ff_chunk"):
            layer.ffn_output.register_forward_hook(lambda *call, drop=layer.dropout: drop(call[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "head"), ENCODERS)
def test_encoders(family, head, tmp_path, monkeypatch):
    config = getattr(transformers, f"{family.split()[0]}Config")().to_dict()
    rates = {name: rate for name, rate in RATES.items() if name in config}
    rates |= {"cls_dropout": 0.4} if "Deberta" in family else {}
    fields = {**encoders.FAMILIES[family], **rates}
    monkeypatch.setitem(encoders.FAMILIES, family, fields)
    theirs = encoders.make(family, head)
    if family == "Albert":
        _drop_outputs_of_layers(theirs)
    for module in theirs.modules():
        # flaxzoo applies no dropout to the vectors of distances.
        if hasattr(module, "pos_dropout"):
            module.pos_dropout.p = 0.0
    names = {name: name for name in encoders.NAMES.get(head, ("logits",))}
    if (family, head) == ("Albert", "pretraining"):
        names["sop_logits"] = names.pop("seq_relationship_logits")
    assert_same_logits(theirs, encoders.inputs(family, head), names, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "suffix", "rates"), DECODERS)
def test_decoders(kind, suffix, rates, tmp_path):
    theirs = decoders.random_model(kind, suffix, **rates)
    given = {"input_ids": decoders.IDS, "attention_mask": np.ones_like(decoders.IDS)}
    assert_same_logits(theirs, given, {"logits": "logits"}, tmp_path)
