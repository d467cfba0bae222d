"""Encoders after BERT: runs that answer and choose, and folders of transformers of other forms."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from flaxzoo import models, train
from flaxzoo.models.encoders.deberta.deberta import DebertaConfig
from flaxzoo.models.encoders.electra import ElectraConfig
from flaxzoo.models.encoders.modernbert import ModernBertConfig
from flaxzoo.models.heads.specs import HEADS
from flaxzoo.train.convert.export import export_model

from ...support.encoders import SIZES, fine_tuning

CONFIGS = {
    "ModernBERT": ModernBertConfig(**SIZES, window=5),
    "ELECTRA": ElectraConfig(**SIZES, d_embedding=8),
    "DeBERTa-v3": DebertaConfig(
        **SIZES,
        position_buckets=8,
        share_projections=True,
        norm_distances=True,
    ),
}
EXAMPLES = {
    "span": [
        {"question": "what saw it", "context": "the cat sat on a mat and then it saw some dog"},
        {"question": "what", "context": "the cat"},
    ],
    "choice": [
        {"context": "it saw some dog", "choices": ["the cat", "a dog and a mat", "red"]},
        {"context": "her big red house", "choices": ["a cat", "some mat", "big"]},
    ],
}


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize("family", CONFIGS)
def test_answers_and_choices_from_training_to_torch(work_folder, tmp_path, family, kind):
    config = fine_tuning(work_folder, kind, epochs=0.0, steps=3)
    train.train(dataclasses.replace(config, model=CONFIGS[family]), tmp_path / "run", quiet=True)
    export_model(tmp_path / "run", tmp_path / "out")

    # The exported folder predicts what the run predicts.
    ours, exported = (
        train.predict(tmp_path / name, EXAMPLES[kind], log=lambda _: None)
        for name in ("run", "out")
    )
    assert len(ours) == len(EXAMPLES[kind])
    assert json.dumps(ours) == json.dumps(exported)

    # transformers reads the folder and computes the same logits.
    model, params = models.load(tmp_path / "run")
    cls = getattr(transformers, HEADS[model.config.head].hf_auto_class)
    theirs, info = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    shape = (2, 3, 9) if kind == "choice" else (2, 9)
    mask = np.ones(shape, np.int64)
    mask[-1, ..., 6:] = 0
    ids = np.random.default_rng(0).integers(5, model.config.vocab_size, shape) * mask
    given = {"input_ids": ids, "attention_mask": mask}
    output = jax.jit(model.apply)({"params": params}, **given)
    with torch.no_grad():
        expected = theirs.eval()(**{name: torch.tensor(x) for name, x in given.items()})
    real = mask == 1 if kind == "span" else slice(None)
    for name in ("start_logits", "end_logits") if kind == "span" else ("logits",):
        found, wanted = np.asarray(getattr(output, name)), expected[name].numpy()
        np.testing.assert_allclose(found[real], wanted[real], rtol=0, atol=1e-5)


BODY = {
    **{"vocab_size": 90, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2},
    **{"intermediate_size": 24, "max_position_embeddings": 16, "pad_token_id": 0},
}
FOLDERS = {
    "ModernBertForMaskedLM": {"local_attention": 8, "bos_token_id": 1, "eos_token_id": 2},
    "DebertaV2ForSequenceClassification": {
        **{"position_buckets": 4, "relative_attention": True, "share_att_key": True},
        **{"pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"},
        **{"position_biased_input": False, "type_vocab_size": 0},
    },
    "AlbertForQuestionAnswering": {"embedding_size": 8, "num_hidden_groups": 2},
    "GteForMaskedLM": {},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_in_half_precision_and_several_files(tmp_path, name):
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    theirs = cls(cls.config_class(**BODY, **FOLDERS[name])).to(torch.bfloat16).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="4KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert not (tmp_path / "model.safetensors").exists()

    # The parameters are float32 with the values of the files.
    model, params = models.load(tmp_path)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
    ids = np.random.default_rng(0).integers(5, 90, (2, 12))
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    output = jax.jit(model.apply)({"params": params}, **given)
    with torch.no_grad():
        expected = theirs.float()(**{key: torch.tensor(x) for key, x in given.items()})
    names = [key for key in expected if key.endswith("logits")]
    assert names
    for key in names:
        wanted = expected[key].numpy()
        np.testing.assert_allclose(getattr(output, key), wanted, rtol=0, atol=1e-5)

    # The execution chooses the precision of the parameters.
    _, half = models.load(tmp_path, execution=models.Execution(param_dtype="bfloat16"))
    assert {x.dtype.name for x in jax.tree.leaves(half)} == {"bfloat16"}
