"""Heads of encoders with a vocabulary matrix of their own, both directions."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.encoders.bert import BertConfig
from flaxzoo.models.hf.save import save
from safetensors.torch import load_file, save_file

SMALL: dict[str, Any] = {"vocab_size": 37, "tie_word_embeddings": False}
BERT: dict[str, Any] = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 24,
}
DISTIL = {"dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 20, "max_position_embeddings": 24}
CLASSES = {
    "BertForMaskedLM": ("Bert", BERT),
    "BertForPreTraining": ("Bert", BERT),
    "BertLMHeadModel": ("Bert", BERT | {"is_decoder": True}),
    "RobertaForMaskedLM": ("Roberta", BERT | {"pad_token_id": 1}),
    "DistilBertForMaskedLM": ("DistilBert", DISTIL),
    "ElectraForMaskedLM": ("Electra", BERT | {"embedding_size": 6}),
}


def made(name, **fields):
    """A model of transformers whose parameters are all random, biases included."""
    torch.manual_seed(0)
    family, sizes = CLASSES[name]
    config = getattr(transformers, f"{family}Config")(**SMALL, **sizes, **fields)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_logits_gradients_and_both_directions(name, tmp_path):
    theirs = made(name)
    theirs.save_pretrained(tmp_path / "in")
    model, params = models.load(tmp_path / "in")
    assert not model.config.tie_output
    ids = np.random.default_rng(0).integers(3, 37, (2, 9))
    weights = np.random.default_rng(1).normal(size=(2, 9, 37)).astype(np.float32)
    names = {"BertForPreTraining": "prediction_logits"}

    def logits(params):
        output = model.apply({"params": params}, input_ids=ids)
        return getattr(output, names.get(name, "logits"))

    output = theirs(input_ids=torch.tensor(ids))
    expected = getattr(output, names.get(name, "logits"))
    assert np.abs(np.asarray(logits(params)) - expected.detach().numpy()).max() < 1e-5
    gradients = jax.grad(lambda params: (logits(params) * weights).sum())(params)
    (expected * torch.tensor(weights)).sum().backward()
    own = theirs.get_output_embeddings().weight.grad.numpy()
    tables = theirs.get_input_embeddings().weight.grad.numpy()
    assert np.abs(gradients["head"]["output_embedding"]["embedding"] - own).max() < 1e-4
    assert np.abs(gradients["token_embedding"]["embedding"] - tables).max() < 1e-4

    save(tmp_path / "out", model, params)
    again, report = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    unused = {"cls.predictions.bias", "lm_head.bias"}  # of the decoder's bias only one is read
    tensors = again.state_dict()
    for key, tensor in theirs.state_dict().items():
        assert key in unused or torch.equal(tensor, tensors[key]), key


@pytest.mark.parametrize(
    ("name", "bias"), [("BertForMaskedLM", "cls.predictions"), ("RobertaForMaskedLM", "lm_head")]
)
def test_files_of_transformers_4_have_one_bias(name, bias, tmp_path):
    theirs = made(name)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    expected = tensors[f"{bias}.bias"] = tensors.pop(f"{bias}.decoder.bias")
    save_file(tensors, file, metadata={"format": "pt"})
    _, params = models.load(tmp_path)
    assert np.array_equal(params["head"]["bias"], expected.numpy())


def test_other_heads_have_no_such_matrix(tmp_path):
    transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, **BERT)
    ).save_pretrained(tmp_path)
    model, _ = models.load(tmp_path)
    assert model.config.tie_output
    sizes = {"vocab_size": 9, "num_layers": 1, "d_model": 8, "num_heads": 2, "max_length": 8}
    config = BertConfig(**sizes, head="masked_lm", tie_output=False)
    assert not config.with_head("pretraining", ()).tie_output
    assert config.with_head("sequence_classification", ("a", "b")).tie_output
    with pytest.raises(UserError, match="head 'none' predicts no tokens: leave tie_output out"):
        BertConfig(**sizes, head="none", tie_output=False)
