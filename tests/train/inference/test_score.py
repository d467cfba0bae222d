"""Probabilities of texts, of next tokens and of given words, against formulas and direct passes."""

import functools
import io
import json
import math
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.data.errors import UserError
from flaxzoo.data.tokenizers.huggingface import WORDPIECE_SPECIALS, wordpiece
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.train.cli.main import main
from flaxzoo.train.inference.score import TextScore, rolling_windows
from flaxzoo.train.objectives.eval_step import make_evaluate_fn

pytestmark = pytest.mark.usefixtures("on_one_device")

SENTENCE = "It takes great courage to let yourself appear weak"
WORDS = SENTENCE.split()
SIZES = {"max_length": 16, "num_layers": 2, "d_model": 16, "num_heads": 2}
PIECES = [*WORDPIECE_SPECIALS, *"the train pulled into station pea ##nut .".split()]


def random_params(config):
    """Parameters large enough that probabilities differ."""
    params = models.init_params(models.create(config), jax.random.key(3))
    return jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, whole words of the sentence, and a token that begins a document."""
    return train_tokenizer([SENTENCE] * 5, TokenizerConfig(kind="byte-bpe", vocab_size=290))


@pytest.fixture(scope="module")
def scorer(tokenizer):
    config = models.GPTConfig(vocab_size=tokenizer.vocab_size, **SIZES)
    return train.TextScorer(models.create(config), random_params(config), tokenizer)


@functools.cache
def plain(scorer):
    """The compiled log-probabilities of every next token at each position of rows."""
    return jax.jit(
        lambda params, ids: jax.nn.log_softmax(
            scorer._model.apply({"params": params}, input_ids=ids).logits
        )
    )


def log_softmax(model, params, ids):
    """Log-probabilities of every next token, by one plain forward pass."""
    logits = jax.jit(model.apply)({"params": params}, input_ids=np.array([ids])).logits[0]
    return np.asarray(jax.nn.log_softmax(logits), np.float64)


def test_the_chain_rule_on_the_lectures_sentence(scorer, tokenizer):
    """Pr(It) · Pr(takes|It) · Pr(great|It takes) · … is Pr of the sentence."""
    [score] = scorer.score([SENTENCE])
    begun = [" ".join(WORDS[:n]) for n in range(len(WORDS))]
    factors = [
        scorer.compare(before, [word], space=n > 0)[0]
        for n, (before, word) in enumerate(zip(begun, WORDS, strict=True))
    ]
    assert score.log_probability == pytest.approx(sum(f.log_probability for f in factors), rel=1e-5)
    assert math.prod(f.probability for f in factors) == pytest.approx(
        math.exp(score.log_probability), rel=1e-4
    )
    assert max(len(f.tokens) for f in factors) > 1  # words of several tokens, too
    assert [token.token for token in score.tokens] == [t for f in factors for t in f.tokens]
    sums = np.cumsum([token.log_probability for token in score.tokens])
    assert [token.sum for token in score.tokens] == pytest.approx(list(sums))
    assert score.tokens[-1].sum == score.log_probability
    number = tokenizer.vocab_size
    for count in (1, 5):
        ids = tokenizer.encode(" ".join(WORDS[:count]))
        every = scorer.next_tokens(" ".join(WORDS[:count]), top_k=number)
        assert sum(token.probability for token in every) == pytest.approx(1, abs=1e-5)
        assert every == sorted(every, key=lambda token: -token.probability)
        following = next(t for t in every if t.id == score.tokens[len(ids)].id)
        assert following.probability == pytest.approx(score.tokens[len(ids)].probability, rel=1e-4)


def test_the_sum_is_the_loss_of_the_evaluation_times_the_tokens(scorer, tokenizer):
    text = SENTENCE[:30]
    ids = [tokenizer.special_ids.bos, *tokenizer.encode(text)]
    batch = {"input_ids": ids[:-1], "labels": ids[1:], "segment_ids": [1] * (len(ids) - 1)}
    batch["position_ids"] = list(range(len(ids) - 1))
    batch = {name: jnp.array([x]) for name, x in batch.items()}
    evaluate = jax.jit(make_evaluate_fn(scorer._model.apply, train.CAUSAL))
    sums, counts, _ = evaluate(scorer._params, batch)
    [score] = scorer.score([text])
    loss = float(sums["next_token"] / counts["next_token"])
    assert score.num_tokens == counts["next_token"]
    assert score.log_probability == pytest.approx(-loss * score.num_tokens, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.parametrize("stride", [1, 5, None, 16])
def test_windows_equal_a_direct_computation(scorer, tokenizer, stride):
    lines = []
    text = " ".join(random.Random(0).choices(WORDS, k=25))
    [score] = scorer.score([text], stride=stride, log=lines.append)
    ids = [tokenizer.special_ids.bos, *tokenizer.encode(text)]
    number = len(ids) - 1
    assert score.num_tokens == number > 30
    assert len(lines) == 1
    assert f"has {len(ids)} tokens, more than the 16 that the model reads" in lines[0]
    step = stride or 8
    # The tokens before each label: all, as far as the first window reaches; then each stride
    # begins where the context does not reach any further back.
    ends = [
        16 if n < 16 else min(16 + step * ((n - 16) // step + 1), number) for n in range(number)
    ]
    rows = np.array([ids[end - 16 : end] for end in ends])
    direct = np.asarray(plain(scorer)(scorer._params, rows))  # [N, 16, V]
    expected = [direct[n, n - (end - 16), ids[n + 1]] for n, end in enumerate(ends)]
    found = [token.log_probability for token in score.tokens]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_windows_predict_every_position_once(seed):
    draw = random.Random(seed)
    context = draw.randint(1, 20)
    length, stride = draw.randint(0, 70), draw.randint(1, context)
    windows = list(rolling_windows(length, context, stride))
    assert [i for _, first, end in windows for i in range(first, end)] == list(range(length))
    assert all(0 <= start <= first < end <= start + context for start, first, end in windows)
    assert all(end - start == context for start, _, end in windows[1:])
    assert all(first - start >= context - stride for start, first, _ in windows[1:])


def test_texts_of_different_lengths_share_batches(scorer):
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(0, 6))) for _ in range(12)]
    together = scorer.score([*texts, ""])
    assert together[-1] == TextScore([], 0.0, 0, 0, 0)
    for text, score in zip(texts[:3], together[:3], strict=True):
        [alone] = scorer.score([text])
        assert score.log_probability == pytest.approx(alone.log_probability, rel=1e-5)
        assert score.num_characters == len(text)


@pytest.mark.slow
def test_it_is_what_transformers_computes(tokenizer, tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=tokenizer.vocab_size, n_positions=64, n_embd=16, n_layer=2, n_head=2,
            initializer_range=0.5, bos_token_id=0, eos_token_id=0,
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    ids = torch.tensor([[0, *tokenizer.encode(SENTENCE)]])
    with torch.no_grad():
        log_probs = torch.log_softmax(theirs(ids).logits[0, :-1], -1)
    expected = log_probs.gather(1, ids[0, 1:, None])[:, 0]
    [score] = train.TextScorer.of_run(tmp_path).score([SENTENCE])
    found = [token.log_probability for token in score.tokens]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_target_is_scored_given_its_source(tmp_path):
    texts = ["one two three", "un deux trois", *"abcdefgh"] * 20
    tokenizer = train_tokenizer(
        texts, TokenizerConfig(kind="sentencepiece-unigram", vocab_size=277)
    )
    config = models.EncoderDecoderConfig(vocab_size=tokenizer.vocab_size, d_ff=32, **SIZES)
    model, params = models.create(config), random_params(config)
    scorer = train.TextScorer(model, params, tokenizer)
    scores = scorer.score(["un", "deux"], ["one two", "two"])
    special = tokenizer.special_ids
    source, target = (tokenizer.encode(x, add_special_tokens=False) for x in ("one two", "un"))
    outputs = jax.jit(model.apply)(
        {"params": params},
        input_ids=np.array([[*source, special.eos]]),
        decoder_input_ids=np.array([[special.bos, *target]]),
    )
    log_probs = np.asarray(jax.nn.log_softmax(outputs.logits[0]))
    labels = [*target, special.eos]
    expected = log_probs[range(len(labels)), labels]
    found = [token.log_probability for token in scores[0].tokens]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    [first] = scorer.next_tokens("", source="one two", top_k=1)
    assert first.probability == pytest.approx(float(np.exp(log_probs[0].max())), rel=1e-4)
    with pytest.raises(UserError, match="2 texts have 0 sources"):
        scorer.score(["un", "deux"])
    with pytest.raises(UserError, match=r"source has [0-9]+ tokens, the model reads 16"):
        scorer.score(["un"], ["one two three " * 40])
    with pytest.raises(UserError, match=r"text 1 has .* that the decoder reads: split it"):
        scorer.score(["un deux trois " * 40], ["one"])


def test_words_are_read_with_the_space_before_them(scorer, tokenizer):
    ids = [tokenizer.special_ids.bos, *tokenizer.encode("It takes great")]
    log_probs = log_softmax(scorer._model, scorer._params, ids)
    for text in ("It takes", "It takes "):
        [word] = scorer.compare(text, ["great"])
        assert word.tokens == [tokenizer.token(id) for id in tokenizer.encode(" great")]

    [spaced], [given] = (
        scorer.compare("It takes", ["great"]),
        scorer.compare("It takes", [" great"]),
    )
    assert given.log_probability == pytest.approx(spaced.log_probability)
    [joined] = scorer.compare("It take", ["z"], space=False)
    assert joined.tokens == ["z"]
    expected = sum(
        log_probs[len(ids) - 1 - n, ids[len(ids) - n]]
        for n in range(1, len(tokenizer.encode(" great")) + 1)
    )
    assert spaced.log_probability == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.score(["a"], stride=0), "stride 0 must be from 1 to 16"),
        (lambda s: s.score(["a"], ["b"]), "a model without an encoder reads no source"),
        (lambda s: s.next_tokens("a", top_k=0), "top_k 0 must be from 1 to"),
        (lambda s: s.next_tokens("", begin=False), "nothing stands before the next token"),
        (lambda s: s.compare("a", []), "there are no words to compare"),
        (lambda s: s.compare("a", [" "]), "the word ' ' is empty"),
        (lambda s: s.compare("a", ["z" * 30]), "has 3[0-9] tokens, the model reads 16"),
    ],
)
def test_what_cannot_be_asked_is_refused(scorer, call, message):
    with pytest.raises(UserError, match=message):
        call(scorer)


def write_model(folder, config, tokenizer):
    folder.mkdir()
    write_weights(folder, config, random_params(config))
    tokenizer.save(folder)
    return folder


def output(capsys, *arguments):
    assert main([str(a) for a in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr()


@pytest.mark.slow
def test_the_commands(tokenizer, scorer, tmp_path, capsys, monkeypatch):
    config = models.GPTConfig(vocab_size=tokenizer.vocab_size, **SIZES)
    folder = write_model(tmp_path / "model", config, tokenizer)
    [expected] = scorer.score([SENTENCE[:40]])
    (tmp_path / "text.txt").write_text(f"{SENTENCE[:40]}\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SENTENCE[:40].encode())))
    for given in (("--text", SENTENCE[:40]), ("--input", tmp_path / "text.txt"), ("--input", "-")):
        found = json.loads(output(capsys, "score", folder, *given, "--json").out)
        assert found["log_probability"] == pytest.approx(expected.log_probability, rel=1e-4)
        assert len(found["tokens"]) == len(expected.tokens)
        assert found["text"] == SENTENCE[:40]
    lines = output(capsys, "score", folder, "--text", SENTENCE[:40], SENTENCE).out.splitlines()
    assert lines[0].split() == ["probability", "log-probability", "sum", "token"]
    assert lines[1].split()[-1] == expected.tokens[0].token
    assert lines.count("") == 1
    (tmp_path / "lines.txt").write_text("It takes\n\ngreat courage\n")
    command = ("score", folder, "--input", tmp_path / "lines.txt", "--lines", "--no-each")
    assert len(output(capsys, *command).out.splitlines()) == 3
    # Without a first token nothing precedes the first: null, and neither NaN nor infinity.
    shown = output(capsys, *command, "--json", "--no-begin").out.splitlines()
    first, empty, _ = (json.loads(line, parse_constant=pytest.fail) for line in shown)
    assert (empty["perplexity"], empty["num_tokens"]) == (None, 0)
    assert "tokens" not in first
    printed = output(capsys, "next", folder, "It takes", "--top-k", "3").out.splitlines()
    assert len(printed) == 3
    assert all(0 < float(line.split()[0]) < 1 for line in printed)
    command = ("next", folder, "It takes", "--words", "great", "weak")
    *_, last = output(capsys, *command).out.splitlines()
    words = json.loads(output(capsys, *command, "--json").out)["words"]
    assert words[0]["probability"] >= words[1]["probability"]
    assert last.startswith(f"p({words[0]['word']}) > p({words[1]['word']}), ")
    assert main(["score", str(folder)]) == 2
    assert "needs either --text or --input" in capsys.readouterr().err


def test_a_perplexity_beyond_the_largest_float_is_null():
    score = TextScore([], -8000.0, 100, 1, 500)
    assert score.totals()["word_perplexity"] is None
    assert score.perplexity == pytest.approx(math.exp(80))
    assert score.character_perplexity == pytest.approx(math.exp(16))


@pytest.fixture(scope="module")
def stations():
    """A small BERT that has learned one sentence by heart."""
    tokenizer = wordpiece(PIECES, lowercase=True)
    config = models.BertConfig(
        vocab_size=len(PIECES), d_ff=32, head="masked_lm", dropout_rate=0.0, **SIZES
    )
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    whole = np.array([tokenizer.encode("the train pulled into the station .")])
    masked = whole.repeat(whole.shape[1] - 2, 0)
    np.fill_diagonal(masked[:, 1:], tokenizer.special_ids.mask)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def learn(params, state):
        def loss(params):
            logits = model.apply({"params": params}, input_ids=masked).logits
            labels = np.broadcast_to(whole, masked.shape)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(60):
        params, state = learn(params, state)
    return config, params, tokenizer


@pytest.mark.slow
def test_train_is_more_probable_than_peanut(stations, tmp_path, capsys):
    config, params, tokenizer = stations
    folder = tmp_path / "bert"
    folder.mkdir()
    write_weights(folder, config, params)
    tokenizer.save(folder)
    text = "The [MASK] pulled into the station"
    command = ("fill-mask", folder, text, "--words", "peanut", "train")
    lines = output(capsys, *command).out.splitlines()
    assert lines[0].split()[1:] == ["train", "train"]
    assert lines[1].split()[1:] == ["peanut", "pea", "##nut"]
    assert lines[2].startswith("p(train) > p(peanut), ")
    train_, peanut = json.loads(output(capsys, *command, "--json").out)["words"]
    assert train_["probability"] > 0.5 > 100 * peanut["probability"]
    # A word of one token has the probability that is shown without --words.
    filler = train.MaskFiller(models.create(config), params, tokenizer)
    [best] = filler(text, top_k=1)[0]
    assert (best.token, best.probability) == ("train", pytest.approx(train_["probability"]))
    # Pieces are filled from left to right, with masks in place of those to come.
    special = tokenizer.special_ids
    _, _, pea, nut = (PIECES.index(p) for p in ("the", "train", "pea", "##nut"))
    front = [special.cls, PIECES.index("the")]
    back = [*tokenizer.encode("pulled into the station", add_special_tokens=False), special.sep]
    expected = 0.0
    for filled, at, piece in (([special.mask] * 2, 2, pea), ([pea, special.mask], 3, nut)):
        ids = [*front, *filled, *back]
        expected += log_softmax(models.create(config), params, ids)[at, piece]
    [word] = filler.compare(text, ["peanut"])
    assert word.log_probability == pytest.approx(float(expected), rel=1e-4)
    assert word.probability == pytest.approx(math.exp(word.log_probability))
    for wrong, message in (
        (("the [MASK] [MASK]", ["train"]), "has 2 masks: write one"),
        ((text, ["zug"]), "the word 'zug' has a character that the vocabulary lacks"),
        ((text, []), "no words to compare"),
    ):
        with pytest.raises(UserError, match=message):
            filler.compare(*wrong)


def test_a_masked_language_model_gives_no_next_token():
    model = models.create(models.BertConfig(vocab_size=len(PIECES), head="masked_lm", **SIZES))
    with pytest.raises(UserError, match="gives no probability of a next token"):
        train.TextScorer(model, {}, wordpiece(PIECES, lowercase=True))
