import itertools
import json
import random

import numpy as np
import pytest
from flaxzoo.data.tokenizers.base import SpecialIds
from flaxzoo.data.tokenizers.characters import CharacterTokenizer
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer
from flaxzoo.models import GPTConfig, TextGenerator, create
from flaxzoo.models.decoding.generator import Generator
from flaxzoo.models.text import generate as sampling

SIZES = {"vocab_size": 300, "max_length": 16, "num_layers": 1, "d_model": 4, "num_heads": 1}
MODEL = create(GPTConfig(**SIZES))
LETTERS = CharacterTokenizer(" abcdefghijklmnopqrstuvwxy\n")  # with two special tokens 29


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """One token per byte: no character outside ASCII is a single token."""
    return train_tokenizer(["any text"], TokenizerConfig("byte-bpe", 257))


class Script(Generator):
    """A model that says what it is told to."""

    def __init__(self, rows, tokens_per_call):
        self.rows = np.array(list(itertools.zip_longest(*rows, fillvalue=0))).T
        self.tokens_per_call = tokens_per_call
        self.prompts, self.calls = [], 0

    def stream(self, prompts, request, *, seed=0, tokens_per_call=None):
        self.prompts, max_new_tokens = prompts, request.max_new_tokens
        for start in range(0, min(max_new_tokens, self.rows.shape[1]), self.tokens_per_call):
            self.calls += 1
            yield self.rows[:, start : min(start + self.tokens_per_call, max_new_tokens)]


@pytest.fixture
def say(monkeypatch):
    """Samples of texts that a model is made to say, the pieces that were streamed, the script."""

    def say(tokenizer, *texts, per_call=1, prompt="a", **options):
        rows = [t if isinstance(t, list) else tokenizer.encode(t) for t in texts]
        script = Script(rows, per_call)
        monkeypatch.setattr(sampling, "Generator", lambda model, params, draft: script)
        pieces = []
        samples = TextGenerator(MODEL, {}, tokenizer)(
            [prompt] * len(rows),
            **{"max_new_tokens": max(map(len, rows)), "on_text": pieces.append, **options},
        )
        assert "".join(pieces) == samples[0].text
        return samples, [piece for piece in pieces if piece], script

    return say


@pytest.fixture(scope="module")
def speaker(tiny):
    """A real model with a tokenizer of its size."""
    model = tiny(num_layers=2)
    return TextGenerator(model.model, model.params, LETTERS)


@pytest.mark.parametrize("per_call", [1, 2, 5])
def test_characters_of_several_tokens_are_streamed_whole(say, bytes_tokenizer, per_call):
    text = "naïve 日本語 🙂🙃 ok"
    samples, pieces, _ = say(bytes_tokenizer, text, per_call=per_call)
    assert samples[0].text == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    if per_call == 1:
        assert pieces == list(text)


def test_half_a_character_comes_out_in_the_end(say, bytes_tokenizer):
    tokens = bytes_tokenizer.encode("ok 🙂")[:-1]
    samples, pieces, _ = say(bytes_tokenizer, tokens)
    assert samples[0].text == "ok \N{REPLACEMENT CHARACTER}"
    assert pieces[:3] == ["o", "k", " "]
    # What no later token can mend is shown at once.
    _, pieces, _ = say(bytes_tokenizer, [*tokens, *bytes_tokenizer.encode("xy")])
    assert pieces[3:] == ["\N{REPLACEMENT CHARACTER}x", "y"]


def test_a_stop_string_ends_a_text(say, bytes_tokenizer):
    samples, pieces, script = say(bytes_tokenizer, "one two\n\nthree", stop=["\n\n"])
    assert (samples[0].text, samples[0].finished) == ("one two", True)
    assert pieces == list("one two")  # a stop string's beginning is held back
    assert script.calls == len("one two\n\n")
    samples, pieces, _ = say(bytes_tokenizer, "a\nb\n", stop=["\n\n"])
    assert (samples[0].text, samples[0].finished) == ("a\nb\n", False)
    assert pieces == ["a", "\nb", "\n"]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("aaab", ["aab"], "a"),
        ("xxabcy", ["c", "abc"], "xx"),
        ("日本語", ["本"], "日"),
        ("stop", ["stop"], ""),
        ("stop", ["stopped"], "stop"),
    ],
)
def test_stop_strings_by_hand(say, bytes_tokenizer, text, stop, expected):
    samples, _, _ = say(bytes_tokenizer, text, stop=stop)
    assert samples[0].text == expected
    assert samples[0].finished == (expected != text)


def test_whatever_the_stop_strings_the_stream_is_the_text(say):
    draw = random.Random(0)

    def word(longest):
        return "".join(draw.choices("ab\n", k=draw.randint(1, longest)))

    for _ in range(300):
        text, stop = word(12), [word(3) for _ in range(draw.randint(0, 3))]
        samples, _, _ = say(LETTERS, text, stop=stop)  # asserts that they are equal
        ends = (n for n in range(len(text) + 1) if any(s in text[:n] for s in stop))
        end = next(ends, None)
        said = text if end is None else text[:end]
        found = [said.find(s) for s in stop if s in said]
        assert samples[0].text == said[: min(found, default=None)]
        assert samples[0].finished == bool(found)


def test_the_end_token_ends_a_text(say):
    samples, pieces, script = say(
        LETTERS, [*LETTERS.encode("ab"), 0, 5, 6], LETTERS.encode("abcde"), per_call=2
    )
    assert [(s.text, s.finished) for s in samples] == [("ab", True), ("abcde", False)]
    assert samples[0].tokens == LETTERS.encode("ab")
    assert pieces == ["ab"]
    assert script.calls == 3  # the other row went on
    samples, _, script = say(LETTERS, [0, 5, 6, 7])
    assert (samples[0].text, samples[0].tokens, samples[0].finished) == ("", [], True)
    assert script.calls == 1


def test_an_empty_prompt_begins_a_document(say):
    _, _, script = say(LETTERS, "abc", prompt="")
    assert script.prompts == [[0]]
    bare = CharacterTokenizer("abc")
    bare.special_ids = SpecialIds()
    with pytest.raises(ValueError, match="the prompt is empty and this tokenizer has no token"):
        say(bare, "abc", prompt="")


@pytest.mark.slow
def test_samples_of_each_prompt_stand_together(speaker):
    samples = speaker(["one", "other"], max_new_tokens=8, num_samples=3, seed=1)
    assert [sample.prompt for sample in samples] == ["one"] * 3 + ["other"] * 3
    assert len({sample.text for sample in samples}) == 6
    for sample in samples:
        assert sample.text == LETTERS.decode(sample.tokens)
        assert len(sample.tokens) == 8 or sample.finished
    again = speaker(["one", "other"], max_new_tokens=8, num_samples=3, seed=1)
    assert again == samples
    assert speaker(["one"], max_new_tokens=8, seed=1)[0] == samples[0]
    assert speaker(["one", "other"], max_new_tokens=8, num_samples=3, seed=2) != samples


def test_what_a_model_says_is_streamed(speaker):
    pieces = []
    (sample,) = speaker(["one"], max_new_tokens=8, seed=1, on_text=pieces.append)
    assert "".join(pieces) == sample.text
    assert [piece for piece in pieces if piece] == list(sample.text)


@pytest.mark.parametrize("kind", ["sentencepiece-unigram", "sentencepiece-bpe", "byte-bpe"])
def test_words_keep_their_spaces(say, kind):
    text = "the cat sat on the mat, and the cat ate the rat that sat there" * 4
    tokenizer = train_tokenizer([text], TokenizerConfig(kind, 276))
    for said in ("the cat", " sat on", "  a  mat \n", "é日 cat"):
        samples, _, _ = say(tokenizer, said)
        assert samples[0].text == said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
        ({"num_samples": 0}, "num_return_sequences 0 must be at least 1"),
        ({"stop": ["x", ""]}, "a stop string is empty"),
    ],
)
def test_bad_options_are_refused(speaker, options, message):
    with pytest.raises(ValueError, match=message):
        speaker(["one"], **{"max_new_tokens": 3, **options})


def test_one_json_object(speaker):
    samples = [sampling.Sample("日", '"b"\n', [3, 4], True)]
    text = sampling.samples_to_json(samples)
    assert "\n" not in text
    assert "日" in text
    expected = {"prompt": "日", "text": '"b"\n', "tokens": [3, 4], "finished": True}
    assert json.loads(text) == {"samples": [expected]}
