"""Heads of encoders with a vocabulary matrix of their own: older files, and other heads."""

import numpy as np
import pytest
import transformers
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.encoders.bert import BertConfig
from safetensors.torch import load_file, save_file

SMALL = {
    "vocab_size": 37,
    "tie_word_embeddings": False,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 24,
}


@pytest.mark.parametrize(
    ("name", "bias"), [("BertForMaskedLM", "cls.predictions"), ("RobertaForMaskedLM", "lm_head")]
)
def test_files_of_transformers_4_have_one_bias(name, bias, tmp_path):
    cls = getattr(transformers, name)
    theirs = cls(cls.config_class(**SMALL, pad_token_id=1))
    theirs.get_output_embeddings().bias.data.normal_()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    expected = tensors[f"{bias}.bias"] = tensors.pop(f"{bias}.decoder.bias")
    save_file(tensors, file, metadata={"format": "pt"})
    _, params = models.load(tmp_path)
    assert np.array_equal(params["head"]["bias"], expected.numpy())


def test_other_heads_have_no_such_matrix(tmp_path):
    config = transformers.BertConfig(**SMALL)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    model, _ = models.load(tmp_path)
    assert model.config.tie_output
    sizes = {"vocab_size": 9, "num_layers": 1, "d_model": 8, "num_heads": 2, "max_length": 8}
    config = BertConfig(**sizes, head="masked_lm", tie_output=False)
    assert not config.with_head("pretraining", ()).tie_output
    assert config.with_head("sequence_classification", ("a", "b")).tie_output
    with pytest.raises(UserError, match=r"head 'none' .*tie_output"):
        BertConfig(**sizes, head="none", tie_output=False)
