"""Patterns of prompts: the exact strings of the lectures, and what is no pattern."""

import pytest
from flaxzoo import data

GRAMMAR = """\
Poor English input: I eated the purple berries.
Good English output: I ate the purple berries.
Poor English input: Thank you for picking me as your designer. I'd appreciate it.
Good English output: Thank you for choosing me as your designer. I appreciate it.
Poor English input: The mentioned changes have done. or I did the alteration that you requested. \
or I changed things you wanted and did the modifications.
Good English output: The requested changes have been made. or I made the alteration that you \
requested. or I changed things you wanted and made the modifications.
Poor English input: I'd be more than happy to work with you in another project.
Good English output:"""
EXAMPLES = [
    ("I eated the purple berries.", "I ate the purple berries."),
    (
        "Thank you for picking me as your designer. I'd appreciate it.",
        "Thank you for choosing me as your designer. I appreciate it.",
    ),
    (
        "The mentioned changes have done. or I did the alteration that you requested. or I changed "
        "things you wanted and did the modifications.",
        "The requested changes have been made. or I made the alteration that you requested. or I "
        "changed things you wanted and made the modifications.",
    ),
]
QUERY = "I'd be more than happy to work with you in another project."
ANSWER = "I'd be more than happy to work with you on another project."


@pytest.mark.parametrize("apostrophe", ["'", "’"])  # printed in one lecture each
def test_the_correction_of_grammar_as_the_lectures_print_it(apostrophe):
    pattern = data.PATTERNS["grammar"]
    shots = [
        pattern.example({"input": poor.replace("'", apostrophe), "output": good})
        for poor, good in EXAMPLES
    ]
    query_fields = {"input": QUERY.replace("'", apostrophe), "output": ANSWER}
    assert "".join(shots) + pattern.query(query_fields) == GRAMMAR.replace("'", apostrophe)
    assert pattern.answer(query_fields) == f" {ANSWER}"  # with the space, as printed
    assert pattern.stops == ("\n",)
    labels = ["Poor English input: ", "Good English output: "]
    assert data.PromptPattern.of_labels(labels, ["input", "output"]) == pattern


def test_invented_words_as_printed():
    pattern = data.PATTERNS["words"]
    whatpu = {
        "definition": 'A "whatpu" is a small, furry animal native to Tanzania.',
        "word": "whatpu",
        "sentence": "We were traveling in Africa and we saw these very cute whatpus.",
    }
    farduddle = {
        "definition": 'To do a "farduddle" means to jump up and down really fast.',
        "word": "farduddle",
    }
    assert pattern.example(whatpu) + pattern.query(farduddle) == (
        'A "whatpu" is a small, furry animal native to Tanzania. An example of a sentence that '
        "uses the word whatpu is:\n"
        "We were traveling in Africa and we saw these very cute whatpus.\n"
        'To do a "farduddle" means to jump up and down really fast. An example of a sentence that '
        "uses the word farduddle is:\n"  # an answer ends with a line feed and must not begin so
    )
    assert pattern.answer(whatpu) == whatpu["sentence"]


def test_the_news_article_as_printed_ends_with_a_space_unless_it_is_left_to_the_model():
    fields = {
        "title": "Star’s Tux Promise Draws Megyn Kelly’s Sarcasm",
        "subtitle": "Joaquin Phoenix pledged to not change for each awards event",
    }
    printed = (
        "Title: Star’s Tux Promise Draws Megyn Kelly’s Sarcasm\n"
        "Subtitle: Joaquin Phoenix pledged to not change for each awards event\n"
        "Article: "
    )
    pattern = data.PATTERNS["news"]
    assert pattern.query(fields) + " " == printed
    assert pattern.query(fields) == printed.rstrip()


def test_sums_and_questions_as_printed():
    fields = {"question": "What is 48 plus 76?", "answer": "124."}
    assert data.PATTERNS["arithmetic"].example(fields) == "Q: What is 48 plus 76? A: 124.\n"
    assert data.PATTERNS["question"].example(fields) == "Q: What is 48 plus 76?\nA: 124.\n"


@pytest.mark.parametrize("pattern", data.PATTERNS.values(), ids=data.PATTERNS)
def test_query_answer_and_end_make_up_the_example(pattern):
    fields = {name: f"the {name} {{}}" for name in pattern.fields}
    whole = pattern.example(fields)
    assert whole.startswith(pattern.query(fields) + pattern.answer(fields))
    assert whole.endswith(pattern.stop)
    assert not pattern.query(fields).endswith((" ", "\t"))


def test_an_answer_ends_with_the_text_after_it():
    assert data.PromptPattern("{a} > {b}").example({"a": "x", "b": "y"}) == "x > y\n"
    assert data.PromptPattern("{a} > {b}").stops == ("\n",)
    assert data.PromptPattern("Q {a}: {b}\n###\n").stops == ("\n###\n", "\nQ")
    assert data.PromptPattern("{{{a}}} {b}").query({"a": "x"}) == "{x}"


def test_a_pattern_by_name_template_or_fields():
    assert data.prompt_pattern("grammar") is data.PATTERNS["grammar"]
    assert data.prompt_pattern(r"{a}\t{b}\n").template == "{a}\t{b}\n"
    assert data.pattern_for(["label", "text"]) is data.PATTERNS["review"]
    assert data.pattern_for(["source", "target"]) is data.PATTERNS["translation"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: data.PromptPattern("no field"), "braces"),
        (lambda: data.PromptPattern("{a} {a}"), "each field once"),
        (lambda: data.PromptPattern("{a} {}"), r"{} in place"),
        (lambda: data.PromptPattern("{a!r} {b}"), r"in place"),
        (lambda: data.PromptPattern("{a} {b:>3}"), r"in place"),
        (lambda: data.PromptPattern("{a} {b"), "faulty braces"),
        (lambda: data.prompt_pattern("gramar"), r"'gramar': .*grammar"),
        (lambda: data.pattern_for(["x", "y"]), "fields x, y: "),
        (lambda: data.PromptPattern.of_labels(["a"], ["b", "c"]), r"1 labels \('a'\)"),
        (
            lambda: data.PATTERNS["question"].example({"questoin": "a", "answer": "b"}),
            r"questoin, answer, .*'question': .*questoin",
        ),
        (lambda: data.PATTERNS["question"].answer({}), "got 'answer'"),
    ],
)
def test_malformed_patterns_are_refused(call, message):
    with pytest.raises(data.UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
