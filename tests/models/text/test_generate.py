import itertools
import json
import random

import numpy as np
import pytest
from flaxzoo.data.tokenizers.base import SpecialIds
from flaxzoo.data.tokenizers.characters import CharacterTokenizer
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer
from flaxzoo.models import GPTConfig, TextGenerator, create
from flaxzoo.models.decoding.continuous_batch import Usage, Written
from flaxzoo.models.decoding.generator import Generator
from flaxzoo.models.text import generate as sampling
from flaxzoo.models.text.completions import Completed, Completion, Prompt

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
        self.prompts, self.calls, self.usage = [], 0, Usage()

    def continuous_batch(self, prompts, request, **options):
        self.prompts, self.max_new_tokens, self.stopped = prompts, request.max_new_tokens, set()
        return self

    def stop(self, number):
        self.stopped.add(number)

    def __iter__(self):
        for start in range(0, min(self.max_new_tokens, self.rows.shape[1]), self.tokens_per_call):
            end = min(start + self.tokens_per_call, self.max_new_tokens)
            self.calls += len(self.stopped) < len(self.rows)
            for row, tokens in enumerate(self.rows[:, start:end].tolist()):
                if row not in self.stopped:
                    yield Written(row, tokens, [])


@pytest.fixture
def stream_of(monkeypatch):
    """Samples of texts that a model is made to say, the pieces that were streamed, the script."""

    def stream_of(tokenizer, *texts, per_call=1, prompt="a", **options):
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

    return stream_of


@pytest.fixture(scope="module")
def speaker(tiny):
    """A real model with a tokenizer of its size."""
    model = tiny(num_layers=2)
    return TextGenerator(model.model, model.params, LETTERS)


@pytest.mark.parametrize("per_call", [1, 2, 5])
def test_characters_of_several_tokens_are_streamed_whole(stream_of, bytes_tokenizer, per_call):
    text = "naïve 日本語 🙂🙃 ok"
    samples, pieces, _ = stream_of(bytes_tokenizer, text, per_call=per_call)
    assert samples[0].text == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    if per_call == 1:
        assert pieces == list(text)


def test_an_incomplete_character_is_yielded_at_the_end(stream_of, bytes_tokenizer):
    tokens = bytes_tokenizer.encode("ok 🙂")[:-1]
    samples, pieces, _ = stream_of(bytes_tokenizer, tokens)
    assert samples[0].text == "ok \N{REPLACEMENT CHARACTER}"
    assert pieces[:3] == ["o", "k", " "]
    # What no later token can mend is shown at once.
    _, pieces, _ = stream_of(bytes_tokenizer, [*tokens, *bytes_tokenizer.encode("xy")])
    assert pieces[3:] == ["\N{REPLACEMENT CHARACTER}x", "y"]


def test_a_stop_string_ends_a_text(stream_of, bytes_tokenizer):
    samples, pieces, script = stream_of(bytes_tokenizer, "one two\n\nthree", stop_strings=["\n\n"])
    assert (samples[0].text, samples[0].finish_reason) == ("one two", "stop")
    assert pieces == list("one two")  # a stop string's beginning is held back
    assert script.calls == len("one two\n\n")
    samples, pieces, _ = stream_of(bytes_tokenizer, "a\nb\n", stop_strings=["\n\n"])
    assert (samples[0].text, samples[0].finish_reason) == ("a\nb\n", "length")
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
def test_stop_strings_by_hand(stream_of, bytes_tokenizer, text, stop, expected):
    samples, _, _ = stream_of(bytes_tokenizer, text, stop_strings=stop)
    assert samples[0].text == expected
    assert samples[0].finish_reason == ("stop" if expected != text else "length")


def test_whatever_the_stop_strings_the_stream_is_the_text(stream_of):
    draw = random.Random(0)

    def word(longest):
        return "".join(draw.choices("ab\n", k=draw.randint(1, longest)))

    for _ in range(300):
        text, stop = word(12), [word(3) for _ in range(draw.randint(0, 3))]
        samples, _, _ = stream_of(LETTERS, text, stop_strings=stop)  # asserts that they are equal
        ends = (n for n in range(len(text) + 1) if any(s in text[:n] for s in stop))
        end = next(ends, None)
        written = text if end is None else text[:end]
        found = [written.find(s) for s in stop if s in written]
        assert samples[0].text == written[: min(found, default=None)]
        assert samples[0].finish_reason == ("stop" if found else "length")


def test_the_end_token_ends_a_text(stream_of):
    samples, pieces, script = stream_of(
        LETTERS, [*LETTERS.encode("ab"), 0, 5, 6], LETTERS.encode("abcde"), per_call=2
    )
    assert [(s.text, s.finish_reason) for s in samples] == [("ab", "end"), ("abcde", "length")]
    assert list(samples[0].tokens) == LETTERS.encode("ab")
    assert pieces == ["ab"]
    assert script.calls == 3  # the other row went on
    samples, _, script = stream_of(LETTERS, [0, 5, 6, 7])
    assert (samples[0].text, samples[0].tokens, samples[0].finish_reason) == ("", (), "end")
    assert script.calls == 1


def test_an_empty_prompt_begins_a_document(stream_of):
    _, _, script = stream_of(LETTERS, "abc", prompt="")
    assert script.prompts == [[0]]
    bare = CharacterTokenizer("abc")
    bare.special_ids = SpecialIds()
    with pytest.raises(ValueError, match=r"prompt .*empty"):
        stream_of(bare, "abc", prompt="")


@pytest.mark.slow
def test_samples_of_each_prompt_stand_together(speaker):
    options = {"max_new_tokens": 8, "num_return_sequences": 3}
    samples = speaker(["one", "other"], seed=1, **options)
    completed = speaker.complete(["one", "other"], seed=1, log=lambda line: None, **options)
    assert [one.tokens for each in completed for one in each.completions] == [
        sample.tokens for sample in samples
    ]
    assert len({sample.text for sample in samples}) == 6
    for sample in samples:
        assert sample.text == LETTERS.decode(sample.tokens)
        assert len(sample.tokens) == 8 or sample.finish_reason == "end"
    assert speaker(["one"], max_new_tokens=8, seed=1)[0].tokens == samples[0].tokens
    assert speaker(["one", "other"], seed=2, **options) != samples


def test_completions_of_a_model_are_streamed(speaker):
    pieces = []
    (sample,) = speaker(["one"], max_new_tokens=8, seed=1, on_text=pieces.append)
    assert "".join(pieces) == sample.text
    assert [piece for piece in pieces if piece] == list(sample.text)


@pytest.mark.parametrize("kind", ["sentencepiece-unigram", "sentencepiece-bpe", "byte-bpe"])
def test_words_keep_their_spaces(stream_of, kind):
    text = "the cat sat on the mat, and the cat ate the rat that sat there" * 4
    tokenizer = train_tokenizer([text], TokenizerConfig(kind, 276))
    for written in ("the cat", " sat on", "  a  mat \n", "é日 cat"):
        samples, _, _ = stream_of(tokenizer, written)
        assert samples[0].text == written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens .*got 0"),
        ({"num_return_sequences": 0}, "num_return_sequences .*got 0"),
        ({"stop_strings": ["x", ""]}, "stop string .*empty"),
    ],
)
def test_bad_options_are_refused(speaker, options, message):
    with pytest.raises(ValueError, match=message):
        speaker(["one"], **{"max_new_tokens": 3, **options})


def test_one_json_object(speaker):
    one = Completion('"b"\n', "end", -1.0, (3, 4), ("x", "y"), None)
    text = sampling.completed_to_samples([Completed(Prompt("日"), (one,))])
    assert "\n" not in text
    assert "日" in text
    expected = {"prompt": "日", "text": '"b"\n', "tokens": [3, 4], "finished": True}
    assert json.loads(text) == {"samples": [expected]}
