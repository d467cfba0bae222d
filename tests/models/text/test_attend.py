"""What words look at, against the attention weights of the models."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer
from flaxzoo.models.decoders.llama import LlamaConfig
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.train.cli.main import main

pytestmark = pytest.mark.usefixtures("on_one_device")

PIECES = [*WORDPIECE_SPECIALS, *"the restaurant was good pea ##nut , it".split()]
SIZES = {"max_length": 32, "num_layers": 2, "d_model": 16, "num_heads": 2, "init_std": 0.5}
TEXT = "The restaurant was good, it peanut"
WORDS = ["[CLS]", "The", "restaurant", "was", "good", ",", "it", "peanut", "[SEP]"]


def attention_of(config, tokenizer):
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    return model, params, models.TextAttention(model, params, tokenizer)


@pytest.fixture(scope="module")
def bert():
    config = models.BertConfig(vocab_size=len(PIECES), d_ff=32, head="masked_lm", **SIZES)
    return attention_of(config, wordpiece(PIECES, lowercase=True))


def test_words_of_several_tokens_look_with_the_mean_and_are_looked_at_with_the_sum(bert):
    model, params, attend = bert
    found = attend(TEXT)
    ids = np.array([wordpiece(PIECES, lowercase=True).encode(TEXT)])
    run = jax.jit(lambda params, ids: model.apply(
        {"params": params}, input_ids=ids, output_attentions=True
    ))  # fmt: skip
    tokens = np.asarray(run(params, ids).attentions)[:, 0]  # [L, N, T, T]
    assert tokens.shape == (2, 2, 10, 10)
    assert found.queries == found.keys == WORDS
    expected = np.concatenate(
        [tokens[..., :7], tokens[..., 7:9].sum(-1, keepdims=True), tokens[..., 9:]], -1
    )
    expected = np.concatenate(
        [expected[:, :, :7], expected[:, :, 7:9].mean(2, keepdims=True), expected[:, :, 9:]], 2
    )
    np.testing.assert_allclose(found.weights, expected, atol=1e-6)
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    each = attend(TEXT, by_token=True)
    assert each.keys[7:9] == ["pea", "##nut"]
    np.testing.assert_allclose(each.weights, tokens, atol=1e-6)
    np.testing.assert_allclose(found.mean(), expected.mean((0, 1)), atol=1e-6)
    np.testing.assert_allclose(found.mean(layer=2), expected[1].mean(0), atol=1e-6)
    np.testing.assert_allclose(found.mean(head=1), expected[:, 0].mean(0), atol=1e-6)
    np.testing.assert_allclose(found.mean(2, 1), expected[1, 0], atol=1e-6)
    assert found.places("IT") == [6]
    with pytest.raises(UserError, match=r"word 'restaurants': .*restaurant"):
        found.places("restaurants")
    with pytest.raises(UserError, match=r"layer 3 .*1 to 2"):
        found.mean(3)
    with pytest.raises(UserError, match="encoder-decoder"):
        attend(TEXT, part="cross")
    with pytest.raises(UserError, match="1 to 32"):
        attend("the " * 40)


@pytest.fixture(scope="module")
def pieces():
    return train_tokenizer([f"{TEXT}. " * 9], TokenizerConfig("sentencepiece-bpe", 290))


@pytest.mark.parametrize("family", [models.GPTConfig, LlamaConfig])
def test_a_causal_model_looks_only_back(family, pieces):
    sizes = {name: value for name, value in SIZES.items() if name != "init_std"}
    _, _, attend = attention_of(family(vocab_size=pieces.vocab_size, **sizes), pieces)
    found = attend(TEXT)
    assert found.queries == WORDS[1:-1]
    assert not np.triu(found.mean(), k=1).any()
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)


@pytest.mark.slow
def test_a_translation_looks_at_its_source(pieces):
    config = models.EncoderDecoderConfig(vocab_size=pieces.vocab_size, d_ff=32, **SIZES)
    _, _, attend = attention_of(config, pieces)
    cross = attend("the restaurant", target="it was good")
    assert cross.keys[:2] == ["the", "restaurant"]
    assert cross.queries[1:] == ["it", "was", "good"]
    assert cross.weights.shape == (2, 2, 4, 3)
    np.testing.assert_allclose(cross.weights.sum(-1), 1, atol=1e-5)
    assert attend("the restaurant", target="it", part="encoder").queries == cross.keys
    own = attend("the restaurant", target="it was good", part="decoder")
    assert own.queries == own.keys == cross.queries
    assert not np.triu(own.mean(), k=1).any()
    assert attend("the restaurant").keys == cross.keys  # of the model's own translation


@pytest.mark.slow
def test_the_command_prints_tables_and_draws(bert, tmp_path, capsys):
    model, params, attend = bert
    write_weights(tmp_path, dataclasses.replace(model.config), params)
    wordpiece(PIECES, lowercase=True).save(tmp_path)
    expected = attend(TEXT)

    def flaxzoo(*options):
        status = main(["attend", str(tmp_path), TEXT, *options])
        printed = capsys.readouterr()
        return status, printed.out.splitlines(), printed.err

    status, lines, _ = flaxzoo("--top-k", "2")
    assert status == 0
    assert [line.split()[0] for line in lines] == WORDS
    best = int(expected.mean()[6].argmax())
    assert lines[6].split()[1:3] == [WORDS[best], f"{expected.mean()[6, best]:.3f}"]
    _, lines, _ = flaxzoo("--word", "it")
    assert lines[0] == "it, word 7 of 9"
    assert lines[1].split() == ["word", "mean", "layer", "1", "layer", "2"]
    assert lines[2].split()[:2] == [WORDS[best], f"{expected.mean()[6, best]:.3f}"]
    _, lines, _ = flaxzoo("--word", "it", "--layer", "2")
    assert lines[1].split() == ["word", "mean", "head", "1", "head", "2"]
    _, lines, _ = flaxzoo("--word", "it", "--layer", "2", "--head", "1", "--json")
    shown = json.loads(lines[0])
    assert shown["queries"] == ["it"]
    np.testing.assert_allclose(shown["weights"][0], expected.mean(2, 1)[6], atol=1e-5)
    for options in ((), ("--layer", "1"), ("--layer", "1", "--head", "2")):
        status, _, message = flaxzoo("--output", str(tmp_path / "it.png"), *options)
        assert (status, "drawn: " in message) == (0, True)
        assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "it.png").unlink()
    status, _, message = flaxzoo("--output", str(tmp_path / "it.gif"))
    assert (status, "--output must be" in message) == (2, True)
    status, _, message = flaxzoo("--head", "3")
    assert (status, "head 3 " in message) == (2, True)
