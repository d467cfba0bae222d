"""Completions of many prompts: alone as in a batch, in order, with log-probabilities."""

import json
from pathlib import Path

import numpy as np
import pytest
from flaxzoo import data, models
from flaxzoo.data.tokenizers.characters import CharacterTokenizer
from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer
from flaxzoo.models.decoding.padding import pad_rows
from flaxzoo.models.text.growing_text import GrowingText
from flaxzoo.models.text.text_model import require_texts

LECTURES = Path(__file__).parents[3] / "colab" / "prompts.jsonl"
LETTERS = CharacterTokenizer(" abcdefghijklmnopqrstuvwxy\n")
PROMPTS = ["one", "a longer prompt than the others", "two", "", "three", "one"]


@pytest.fixture(scope="module")
def tiny_model(tiny):
    return tiny(num_layers=1, max_length=64)


@pytest.fixture(scope="module")
def speaker(tiny_model):
    return models.TextGenerator(tiny_model.model, tiny_model.params, LETTERS)


@pytest.fixture(scope="module")
def completed(speaker):
    """Six prompts, two completions each, in five rows; and what was logged."""
    lines, batches = [], []
    answers = speaker.complete(
        PROMPTS,
        max_new_tokens=9,
        num_return_sequences=2,
        seed=5,
        batch_size=5,
        on_batch=lambda prompts, tokens: batches.append((prompts, tokens)),
        log=lines.append,
    )
    return answers, lines, batches


def test_an_answer_does_not_depend_on_its_batch(speaker, completed):
    answers, _, _ = completed
    assert [answer.prompt.text for answer in answers] == PROMPTS
    assert [answer.prompt.seed for answer in answers] == [5, 6, 7, 8, 9, 10]
    for answer in answers[1:4]:
        [alone] = speaker.complete([answer.prompt], max_new_tokens=9, num_return_sequences=2)
        for one, other in zip(alone.completions, answer.completions, strict=True):
            assert (one.text, one.tokens, one.finish_reason) == (
                other.text,
                other.tokens,
                other.finish_reason,
            )
            np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, atol=1e-5)
    # As `generate` with that seed, and another text with another seed.
    samples = speaker(["two"], max_new_tokens=9, num_return_sequences=2, seed=7)
    assert [sample.text for sample in samples] == [one.text for one in answers[2].completions]
    assert answers[0].completions[0].text != answers[5].completions[0].text


def test_log_probabilities_are_the_models_own(tiny_model, completed):
    for answer in completed[0]:
        prompt = LETTERS.encode(answer.prompt.text) or [0]
        for one in answer.completions:
            chosen = [*one.tokens, *([0] if one.finish_reason == "end" else [])]
            ids, mask = pad_rows([prompt + chosen], length=64)
            logits = np.asarray(tiny_model(input_ids=ids, attention_mask=mask).logits[0], float)
            every = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            own = [every[len(prompt) + i - 1, token] for i, token in enumerate(chosen)]
            np.testing.assert_allclose(own[: len(one.tokens)], one.log_probabilities, atol=1e-4)
            np.testing.assert_allclose(sum(own), one.log_probability, atol=1e-4)


def test_the_share_of_padding_is_logged(completed):
    answers, lines, batches = completed
    assert len(lines) == 1
    assert [prompts for prompts, _ in batches] == 12 * [1]
    written = [one for answer in answers for one in answer.completions]
    count = sum(len(one.tokens) + (one.finish_reason == "end") for one in written)
    assert sum(tokens for _, tokens in batches) == count
    read = 2 * sum(len(LETTERS.encode(prompt)) or 1 for prompt in PROMPTS)
    share = f"{1 - read / (12 * 32):.1%}"
    assert lines[0].startswith(f"6 prompts: 5 rows at a time, {share} of the positions read and ")


@pytest.mark.parametrize(
    ("kind", "size"), [("characters", 0), ("byte-bpe", 280), ("wordpiece", 40)]
)
def test_a_growing_text_is_the_text_of_all_its_tokens(kind, size):
    """Random tokens, most of them parts of characters, after prompts that end anywhere."""
    tokenizer = LETTERS
    if kind != "characters":
        tokenizer = train_tokenizer(
            ["größer 日本語 😀 isn't it ?"] * 9, TokenizerConfig(kind, size)
        )
    assert tokenizer.joins_bytes == (kind != "wordpiece")
    draw = np.random.default_rng(0)
    ids = tokenizer.encode("größer 日本語 😀", add_special_tokens=False)
    for number in range(20):
        before, drawn = ids[:number], draw.integers(0, tokenizer.vocab_size, 60).tolist()
        tokens = [*ids[number:], *drawn, *ids]
        # Tokens of a prompt that is given as tokens are not decoded with the text.
        with_text, alone = models.Prompt("a"), models.Prompt("", ids=tuple(before))
        for prompt, decoded in ((with_text, before), (alone, [])):
            growing = GrowingText(tokenizer, prompt, before)
            for i, token in enumerate(tokens):
                growing.grow([token])
                whole = tokenizer.decode([*decoded, *tokens[: i + 1]])
                assert growing.text == whole[len(tokenizer.decode(decoded)) :]


class Recorder(GrowingText):
    """Texts that end after 1, 5, 2, 9, 1, 5, … tokens."""

    def grow(self, tokens, log_probabilities=()):
        if self.limit is not None:
            self.limit = min(self.limit, (1, 5, 2, 9)[len(self.prompt_ids) % 4])
        super().grow(tokens, log_probabilities)


def test_a_row_that_has_ended_is_taken_by_the_next_text(speaker, completed, monkeypatch):
    """As many texts as before, of other lengths: a batch would wait for its longest."""
    monkeypatch.setattr("flaxzoo.models.text.generate.GrowingText", Recorder)
    lines = []
    answers = speaker.complete(
        PROMPTS, max_new_tokens=9, num_return_sequences=2, seed=5, batch_size=5, log=lines.append
    )
    for answer, whole in zip(answers, completed[0], strict=True):
        for one, other in zip(answer.completions, whole.completions, strict=True):
            assert one.tokens == other.tokens[: len(one.tokens)]
    assert float(lines[0].rpartition("and ")[2].partition("%")[0]) < 25


def test_mixtures_of_experts_are_completed_in_step(tiny):
    """Their rows cannot advance by themselves: the next texts begin when all have ended."""
    mixture = tiny(num_layers=1, max_length=64, num_experts=2)
    speaker = models.TextGenerator(mixture.model, mixture.params, LETTERS)
    lines = []
    answers = speaker.complete(
        PROMPTS[:3], max_new_tokens=3, batch_size=2, seed=5, log=lines.append
    )
    assert lines[0].startswith("3 prompts: 2 rows at a time, ")
    [alone] = speaker.complete(PROMPTS[1:2], max_new_tokens=3, seed=6)
    assert alone.completions[0].tokens == answers[1].completions[0].tokens


def test_a_draft_model_changes_no_greedy_completion(tiny_model, tiny, speaker):
    other = tiny(num_layers=2, max_length=32)
    drafted = speaker.with_draft(models.TextGenerator(other.model, other.params, LETTERS), 3)
    options = {"max_new_tokens": 9, "temperature": 0.0, "batch_size": 2, "log": lambda line: None}
    answers = drafted.complete(PROMPTS, **options)
    for answer, alone in zip(answers, speaker.complete(PROMPTS, **options), strict=True):
        assert answer.completions[0].tokens == alone.completions[0].tokens
    seen = drafted.acceptance
    assert f"{seen.accepted:,} of {seen.proposed:,} " in str(seen)
    letters = CharacterTokenizer(" abcdefghijklmnopqrstuvwxz\n")
    for tokenizer, message in (
        (letters, "its token 27 is 'z', but .* is 'y'"),
        (CharacterTokenizer(" abc"), "it has 6 tokens, .* has 29"),
    ):
        with pytest.raises(data.UserError, match=f"draft .*tokenizer: {message}"):
            speaker.with_draft(models.TextGenerator(other.model, other.params, tokenizer))


def test_each_prompt_may_have_its_own_settings(speaker, completed):
    text = completed[0][2].completions[0].text  # of "two" with seed 7
    stop = text[2:4]
    first = text.find(stop)
    prompts = [
        models.Prompt("two", seed=7, stop_strings=(stop,)),
        models.Prompt("two", seed=7, max_new_tokens=3),
        models.Prompt("two", seed=7),
        "y" * 99,
    ]
    lines = []
    answers = speaker.complete(
        prompts, max_new_tokens=9, stop_strings=["not here"], log=lines.append
    )
    assert lines[0].startswith("1 of 4 prompts exceed the 64 tokens that the model reads")
    ends = [
        (one.text, one.finish_reason) for [one] in (answer.completions for answer in answers[:3])
    ]
    whole = completed[0][2].completions[0]
    assert ends == [(text[:first], "stop"), (text[:3], "length"), (text, whole.finish_reason)]
    assert answers[0].completions[0].tokens == whole.tokens[: first + 2]  # the stop string, too
    assert [answer.prompt.max_new_tokens for answer in answers] == [9, 3, 9, 9]


@pytest.mark.slow
def test_beams_complete_prompts_of_any_length_alike(speaker):
    options = {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2}
    prompts = ["one", "longer prompt", models.Prompt("two", max_new_tokens=3)]
    answers = speaker.complete(prompts, batch_size=2, log=lambda line: None, **options)
    [alone] = speaker.complete(["one"], **options)
    assert [one.text for one in answers[0].completions] == [one.text for one in alone.completions]
    for answer, limit in zip(answers, (5, 5, 3), strict=True):
        assert [one.finish_reason == "end" for one in answer.completions] == [
            len(one.tokens) < limit for one in answer.completions
        ]
    first, second = alone.completions
    assert first.log_probabilities is None
    assert 0 > first.log_probability > second.log_probability
    with pytest.raises(data.UserError, match=r"prompt 1 .*99 tokens"):
        speaker.complete(["a", "b" * 99], **options)


def test_a_line_of_json_has_it_all(speaker):
    prompt = models.Prompt("ab", seed=3, fields={"name": "first"})
    [answer] = speaker.complete([prompt], max_new_tokens=2, temperature=0.0)
    line = models.completed_to_json(answer)
    assert "\n" not in line
    found = json.loads(line)
    assert (found["name"], found["prompt"], found["seed"]) == ("first", "ab", 3)
    [one] = found["completions"]
    assert one["text"] == LETTERS.decode(one["tokens"])
    assert one["pieces"] == [LETTERS.token(token) for token in one["tokens"]]
    assert sum(one["log_probabilities"]) == pytest.approx(one["log_probability"])
    assert one["finish_reason"] == "length"


def test_prompts_of_a_file(tmp_path):
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\n two \n")
    assert [prompt.text for prompt in models.read_prompts(str(text))] == ["one", "", " two "]
    lines.write_text(
        '{"prompt": "one\\n", "seed": 3, "stop_strings": "\\n", "id": 7}\n\n'
        '{"prompt": "two", "stop_strings": ["a", "b"], "max_new_tokens": 4}\n'
    )
    assert models.read_prompts(str(lines)) == [
        models.Prompt("one\n", seed=3, stop_strings=("\n",), fields={"id": 7}),
        models.Prompt("two", stop_strings=("a", "b"), max_new_tokens=4),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no prompts .*a.jsonl"),
        ("[1]", "line 1 .*JSON list"),
        ('{"text": "a"}', "line 1 .*'prompt' .*text"),
        ('{"prompt": 3}', "'prompt' .*3"),
        ('{"prompt": "a", "seed": "b"}', "line 1: 'seed' .*'b'"),
        ('{"prompt": "a", "seed": -1}', "line 1: 'seed' .*-1"),
        ('{"prompt": "a", "stop_strings": [1]}', r"line 1: 'stop_strings' .*1"),
        ('{"prompt": "a", "stop_strings": [""]}', "line 1: .*stop string .*empty"),
        ('{"prompt": "a", "max_new_tokens": 0}', "line 1: 'max_new_tokens' .*0"),
        ('{"prompt": "a", "max_tokens": 5}', "'max_tokens': .*'max_new_tokens'"),
        ('{"prompt": "a", "temperature": 0}', "'temperature', .*all prompts"),
    ],
)
def test_lines_that_are_no_prompts_are_refused(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    with pytest.raises(data.DataError, match=message) as caught:
        models.read_prompts(f"{tmp_path}/a.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts must .*at least one"),
        (["a"], {"batch_size": 0}, "batch_size .*1.* 0"),
        (["a"], {"stop_strings": [""]}, "stop string .*empty"),
        ("ab", {}, "prompts .*'ab'"),
        (["a"], {"stop_strings": "ab"}, "stop_strings .*'ab'"),
        (["a"], {"max_tokens": 3}, r"max_tokens \(.*max_new_tokens"),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens .*got 0"),
    ],
)
def test_bad_options_are_refused(speaker, prompts, options, message):
    with pytest.raises(data.UserError, match=message):
        speaker.complete(prompts, **{"max_new_tokens": 3, **options})


@pytest.mark.parametrize("texts", ["ab", 3, [3], [["a"]], None])
def test_an_argument_that_is_not_a_list_of_texts_is_named(texts):
    with pytest.raises(data.UserError, match=r"stop_strings .*list"):
        require_texts(texts, "stop_strings")


def test_the_prompts_of_the_lectures_are_those_that_patterns_make():
    """The strings themselves are in tests/data/prompts/test_pattern.py, as printed."""
    prompts = {str(prompt.fields["name"]): prompt for prompt in models.read_prompts(str(LECTURES))}
    assert len(prompts) == 11
    grammar = prompts["grammar"]
    lines = [line.partition(": ")[2] for line in grammar.text.splitlines()]
    rows = [
        {"input": poor, "output": good} for poor, good in zip(lines[::2], lines[1::2], strict=True)
    ]
    pattern = data.PATTERNS["grammar"]
    assert rows[0] == {
        "input": "I eated the purple berries.",
        "output": "I ate the purple berries.",
    }
    assert grammar.text == "".join(map(pattern.example, rows[:3])) + pattern.query(rows[3])
    assert grammar.stop_strings == ("\n",)
    assert grammar.fields["answer"] == pattern.answer(
        {"output": "I'd be more than happy to work with you on another project."}
    )
    other = prompts["grammar with typographic apostrophes"].text
    assert other == grammar.text.replace("'", "’")
    assert other.count("’") == 2
    first, second = prompts["farduddle"], prompts["yalubalu"]
    assert second.text.startswith(f"{first.text}{first.fields['answer']}\n")
    words = {
        "definition": 'A "yalubalu" is a type of vegetable that looks like a big pumpkin.',
        "word": "yalubalu",
    }
    assert second.text.endswith(f"\n{data.PATTERNS['words'].query(words)}")
    news = {
        "title": "Star’s Tux Promise Draws Megyn Kelly’s Sarcasm",
        "subtitle": "Joaquin Phoenix pledged to not change for each awards event",
    }
    assert prompts["news"].text == data.PATTERNS["news"].query(news) + " "
    sum_ = {"question": "What is 48 plus 76?", "answer": "124."}
    assert prompts["arithmetic"].text == data.PATTERNS["arithmetic"].query(sum_)
    assert prompts["arithmetic"].fields["answer"] == data.PATTERNS["arithmetic"].answer(sum_)
    assert prompts["Borealis"].text == "Borealis AI is a great place to work because"
    assert prompts["serendipity"].fields["demonstration"] == (
        "Running into Margaret and being introduced to Tom was a fortunate stroke of serendipity."
    )
