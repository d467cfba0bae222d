"""The probability of texts and of what comes next, against logits computed in one pass."""

import io
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data.tokenizers.base import SpecialIds
from flaxzoo.data.tokenizers.huggingface import HuggingFaceTokenizer
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.models.text.score import TextScore, TokenScore
from flaxzoo.train.cli.main import main
from flaxzoo.train.losses.eval_step import make_evaluate_fn
from tokenizers import processors

# The factors of this sentence are written out in the lectures.
SENTENCE = "It takes great courage to let yourself appear weak"
LENGTH = 24


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(
        [f"{SENTENCE}. The train pulled in. " * 9], TokenizerConfig("byte-bpe", 290)
    )


def scorer_of(config, tokenizer):
    model = models.create(config)
    return models.TextScorer(model, models.init_params(model, jax.random.key(0)), tokenizer)


@pytest.fixture(scope="module")
def sizes(tokenizer):
    return {
        "vocab_size": tokenizer.vocab_size + 3,  # rows without a token
        "max_length": LENGTH,
        "num_layers": 1,
        "d_model": 16,
        "num_heads": 2,
        "init_std": 0.5,
    }


@pytest.fixture(scope="module")
def scorer(sizes, tokenizer):
    return scorer_of(models.GPTConfig(**sizes), tokenizer)


def log_probabilities(scorer, row):
    """log p of each token of a row but the first, in one pass over all of it."""
    ids = np.asarray([row])
    logits = scorer._model.apply({"params": scorer._params}, input_ids=ids[:, :-1]).logits[0]
    return np.asarray(jax.nn.log_softmax(logits))[np.arange(len(row) - 1), row[1:]]


def test_a_text_is_the_product_of_its_tokens(scorer, tokenizer):
    [score, other] = scorer([SENTENCE, "weak"])
    ids = tokenizer.encode(SENTENCE, add_special_tokens=False)
    expected = log_probabilities(scorer, [tokenizer.special_ids.bos, *ids])
    assert [token.id for token in score.tokens] == ids
    np.testing.assert_allclose([t.log_probability for t in score.tokens], expected, atol=1e-5)
    np.testing.assert_allclose([t.total for t in score.tokens], np.cumsum(expected), atol=1e-4)
    assert score.log_probability == pytest.approx(expected.sum(), abs=1e-4)
    assert score.perplexity == pytest.approx(math.exp(-expected.mean()), rel=1e-4)
    assert score.word_perplexity == pytest.approx(math.exp(-expected.sum() / 9), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(-expected.sum() / math.log(2) / 50, rel=1e-4)
    assert other.text == "weak"


def test_each_token_has_the_probability_that_next_tokens_gave_it(scorer, tokenizer):
    [score] = scorer(["The train"])
    ids = [token.id for token in score.tokens]
    for i, token in enumerate(score.tokens):
        found = scorer.next_tokens(tokenizer.decode(ids[:i]), top_k=tokenizer.vocab_size)
        assert [other.probability for other in found if other.id == token.id] == [
            pytest.approx(token.probability, rel=1e-4)
        ]


def test_next_tokens_are_sorted_and_sum_to_one(sizes, tokenizer):
    whole = scorer_of(models.GPTConfig(**{**sizes, "vocab_size": tokenizer.vocab_size}), tokenizer)
    found = whole.next_tokens("The train pulled into the", top_k=tokenizer.vocab_size)
    probabilities = [token.probability for token in found]
    assert probabilities == sorted(probabilities, reverse=True)
    assert sum(probabilities) == pytest.approx(1, abs=1e-5)
    assert found[:3] == whole.next_tokens("The train pulled into the", top_k=3)
    # Of a longer text the end counts.
    end = whole.next_tokens(" courage" * 99, top_k=3)
    assert whole.next_tokens("It takes" + " courage" * 99, top_k=3) == end
    assert whole.next_tokens(" courage" * 99 + " great", top_k=3) != end


def test_a_word_of_several_tokens_has_their_product(scorer):
    [best, worse] = scorer.next_words("The train pulled in", ["peanut", "weak"])
    assert best.log_probability >= worse.log_probability
    words = {word.word: word for word in (best, worse)}
    assert len(words["peanut"].tokens) > 1
    [before] = scorer(["The train pulled in"])
    for word, found in words.items():
        [joined] = scorer([f"The train pulled in {word}"])
        assert found.log_probability == pytest.approx(
            joined.log_probability - before.log_probability, abs=1e-4
        )
    spaced = scorer.next_words("The train pulled in  ", ["peanut", "weak"])
    assert [word.probability for word in spaced] == [best.probability, worse.probability]


def test_one_space_before_a_word_and_none_after_a_line_feed(scorer):
    [word] = scorer.next_words("It takes  ", [" great "])
    [same] = scorer.next_words("It takes", ["great"])
    assert word.tokens == same.tokens
    [first] = scorer.next_words("It takes\n", ["great"])
    assert first.tokens[0].token != same.tokens[0].token
    assert first.log_probability == pytest.approx(
        scorer(["It takes\ngreat"])[0].log_probability - scorer(["It takes\n"])[0].log_probability,
        abs=1e-4,
    )


def test_a_model_that_sees_later_tokens_scores_nothing(sizes, tokenizer):
    config = models.GPTConfig(**{**sizes, "vocab_size": tokenizer.vocab_size}, causal=False)
    with pytest.raises(ValueError, match=r"later tokens \(causal"):
        scorer_of(config, tokenizer)


def test_a_vocabulary_without_a_beginning_leaves_the_first_token_out(sizes):
    """No probability is stated for a word that would be the first token."""
    pieces = train_tokenizer([SENTENCE * 9], TokenizerConfig("byte-bpe", 260))
    pieces.special_ids = SpecialIds()
    sizes = {**sizes, "vocab_size": pieces.vocab_size}
    [score] = scorer_of(models.GPTConfig(**sizes), pieces)(["great courage"])
    first, *others = score.tokens
    assert (first.log_probability, first.probability, first.total) == (None, None, 0.0)
    assert others
    assert all(token.log_probability < 0 for token in others)
    assert score.num_scored == len(others)


def test_a_text_follows_what_its_frame_puts_before_it(sizes):
    pieces = train_tokenizer([SENTENCE * 9], TokenizerConfig("byte-bpe", 260))
    backend = pieces.backend()
    backend.add_special_tokens(["<a>", "<b>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<a> <b> $A <a>",
        pair="<a> <b> $A $B <a>",
        special_tokens=[(name, backend.token_to_id(name)) for name in ("<a>", "<b>")],
    )
    framed = HuggingFaceTokenizer(backend, pieces.special_ids)
    sizes = {**sizes, "vocab_size": framed.vocab_size}
    scorer = scorer_of(models.GPTConfig(**sizes), framed)
    [score] = scorer(["great courage"])
    row = framed.encode("great courage")
    expected = log_probabilities(scorer, row[:-1])[1:]
    found = [token.log_probability for token in score.tokens]
    assert [token.id for token in score.tokens] == row[2:-1]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_translation_is_scored_after_its_source(sizes):
    from flaxzoo.data.tasks.translation import encode_source, start_and_end

    tokenizer = train_tokenizer([SENTENCE * 9], TokenizerConfig("sentencepiece-bpe", 290))
    config = models.EncoderDecoderConfig(**{**sizes, "vocab_size": tokenizer.vocab_size})
    scorer = scorer_of(config, tokenizer)
    [score, _] = scorer(["weak", "great"], sources=["It takes", "courage"])
    start, end = start_and_end(tokenizer)
    labels = [*tokenizer.encode("weak", add_special_tokens=False), end]
    logits = scorer._model.apply(
        {"params": scorer._params},
        input_ids=np.asarray([encode_source(tokenizer, "It takes")]),
        decoder_input_ids=np.asarray([[start, *labels[:-1]]]),
    ).logits[0]
    expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(labels)), labels]
    np.testing.assert_allclose([t.log_probability for t in score.tokens], expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"0 sources .*1 texts"):
        scorer(["weak"])
    with pytest.raises(ValueError, match="seq2seq_lm"):
        scorer.next_tokens("weak")
    with pytest.raises(ValueError, match=f"reads {LENGTH}"):
        scorer(["weak"], sources=[SENTENCE * 9])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s([]), "texts must .*at least one"),
        (lambda s: s("weak"), "texts .* 'weak'"),
        (lambda s: s(["a", ""]), "text 2 .*''"),
        (lambda s: s(["a"], sources=["b"]), "1 sources .*1 texts"),
        (lambda s: s.next_tokens("a", top_k=0), "top_k 0 .*1 to "),
        (lambda s: s.next_words("a", []), "words"),
        (lambda s: s.next_words("a", ["b", " "]), "word ' ' .*empty"),
        (lambda s: s(["a"], stride=0), "stride 0 .*1 to 24"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_a_line(scorer, call, message):
    with pytest.raises(ValueError, match=message):
        call(scorer)


@pytest.mark.slow
def test_the_commands_print_what_the_functions_return(scorer, tokenizer, tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    write_weights(folder, scorer._model.config, scorer._params)
    tokenizer.save(folder)

    def flaxzoo(*arguments):
        capsys.readouterr()
        assert main([*arguments]) == 0
        return capsys.readouterr().out.splitlines()

    [score] = scorer([SENTENCE])
    lines = flaxzoo("score", str(folder), "--text", SENTENCE, "--each")
    assert len(lines) == len(score.tokens) + 2
    first = score.tokens[0]
    assert lines[1].split() == [
        f"{first.probability:.6f}",
        *(f"{number:.4f}" for number in (first.log_probability, first.total)),
        first.token,
    ]
    assert lines[-1].startswith(f"ln Pr {score.log_probability:.4f}, {len(score.tokens)} tokens")
    (tmp_path / "texts").write_text(f"{SENTENCE}\nweak\n")
    answers = [
        json.loads(line)
        for line in flaxzoo("score", str(folder), "--input", str(tmp_path / "texts"), "--json")
    ]
    assert [answer["text"] for answer in answers] == [SENTENCE, "weak"]
    assert answers[0]["log_probability"] == pytest.approx(score.log_probability, abs=1e-5)
    assert len(answers[0]["each"]) == answers[0]["tokens"] == len(score.tokens)
    best = scorer.next_tokens("The train", top_k=2)
    assert flaxzoo("next", str(folder), "The train", "--top-k", "2") == [
        f"{token.probability:.6f}  {token.token}" for token in best
    ]
    words = flaxzoo("next", str(folder), "The train", "--words", "weak", "great")
    assert [line.split()[1] for line in words] == [
        word.word for word in scorer.next_words("The train", ["weak", "great"])
    ]
    assert words[1].endswith("of the best")
    assert main(["next", str(folder), "The train", "--words"]) == 2
    assert "words is empty" in capsys.readouterr().err
    assert main(["score", str(folder)]) == 2
    assert "--text nor --input" in capsys.readouterr().err


def test_the_factors_of_the_lectures_sentence(scorer):
    """Pr(It) · Pr(takes|It) · Pr(great|It takes) · … is Pr of the sentence."""
    words = SENTENCE.split()
    factors = [scorer.next_words(" ".join(words[:n]), [word])[0] for n, word in enumerate(words)]
    [score] = scorer([SENTENCE])
    assert score.log_probability == pytest.approx(
        sum(factor.log_probability for factor in factors), abs=1e-4
    )
    assert math.prod(factor.probability for factor in factors) == pytest.approx(
        math.exp(score.log_probability), rel=1e-3
    )


def test_the_sum_is_the_loss_of_the_evaluation_times_the_tokens(scorer, tokenizer):
    ids = [tokenizer.special_ids.bos, *tokenizer.encode(SENTENCE, add_special_tokens=False)]
    number = len(ids) - 1
    batch = {"input_ids": ids[:-1], "labels": ids[1:], "segment_ids": [1] * number}
    batch["position_ids"] = list(range(number))
    batch = {name: jnp.array([x]) for name, x in batch.items()}
    evaluate = jax.jit(make_evaluate_fn(scorer._model.apply, train.CAUSAL))
    sums, counts, _ = evaluate(scorer._params, batch)
    loss = float(sums["next_token"] / counts["next_token"])
    [score] = scorer([SENTENCE])
    assert score.num_scored == counts["next_token"] == number
    assert score.log_probability == pytest.approx(-loss * number, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.parametrize("stride", [1, 7, LENGTH])
def test_windows_equal_a_direct_computation(scorer, tokenizer, stride):
    """Each token is scored once, after at least length - stride tokens, by any stride."""
    text = f"{SENTENCE}. " * 4
    lines: list[str] = []
    [score] = scorer([text], stride=stride, log=lines.append)
    assert len(score.tokens) == score.num_scored > 3 * LENGTH
    [line] = lines
    assert f"{stride} tokens apart" in line
    row = [tokenizer.special_ids.bos, *tokenizer.encode(text, add_special_tokens=False)]
    # Where the window begins that predicts label i: with the stride that reaches it first.
    starts = [max(0, -(-(i + 1 - LENGTH) // stride) * stride) for i in range(len(row) - 1)]
    padded = np.array([[*row[s : s + LENGTH], *[0] * LENGTH][:LENGTH] for s in starts])
    plain = jax.jit(lambda params, ids: scorer._model.apply({"params": params}, input_ids=ids))
    log_softmax = np.asarray(jax.nn.log_softmax(plain(scorer._params, padded).logits))
    expected = [log_softmax[i, i - s, row[i + 1]] for i, s in enumerate(starts)]
    assert all(i - s >= LENGTH - stride for i, s in enumerate(starts) if s)
    found = [token.log_probability for token in score.tokens]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_figures_beyond_the_largest_float_are_numbers():
    """JSON has neither NaN nor infinity."""
    score = TextScore("word", (TokenScore("word", 0, -1e30, -1e30),))
    assert math.isfinite(score.perplexity)
    assert math.isfinite(score.word_perplexity)


def test_a_file_is_one_text_or_one_for_each_line(scorer, tokenizer, tmp_path, capsys, monkeypatch):
    write_weights(tmp_path, scorer._model.config, scorer._params)
    tokenizer.save(tmp_path)
    text = "It takes\ngreat courage"
    (tmp_path / "text").write_text(f"{text}\n")
    [expected] = scorer([text])
    for given in (str(tmp_path / "text"), "-"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert main(["score", str(tmp_path), "--input", given, "--whole", "--json"]) == 0
        found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        assert found["text"] == text
        assert found["log_probability"] == pytest.approx(expected.log_probability, abs=1e-4)
    assert main(["score", str(tmp_path), "--input", str(tmp_path / "text"), "--whole"]) == 0
    assert capsys.readouterr().out.endswith(f" bits per byte: {tmp_path}/text\n")  # not its text
    assert main(["score", str(tmp_path), "--text", "a", "--whole"]) == 2
    assert "--whole " in capsys.readouterr().err
