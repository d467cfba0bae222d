"""A growing prompt: each answer becomes an example for later queries (Brown et al. 2020, 3.9.5)."""

from collections.abc import Callable, Mapping, Sequence

from ...data.prompts.pattern import PromptPattern


def answer_in_turn(
    answer: Callable[[str], str],
    pattern: PromptPattern,
    examples: Sequence[Mapping[str, str]],
    queries: Sequence[Mapping[str, str]],
) -> list[Mapping[str, str]]:
    r"""Answers queries one by one, and appends each answer to the prompt of the next query.

    Example::

        generator = models.TextGenerator.of_run("gpt2")

        def answer(prompt):
            (text,) = generator([prompt], stop_strings=["\n"], max_new_tokens=40)
            return text.text

        queries = [{"definition": 'A "yalubalu" is a type of vegetable.', "word": "yalubalu"}]
        train.answer_in_turn(answer, data.PATTERNS["words"], [whatpu], queries)

    Args:
        answer: returns the model's answer to a prompt.
        pattern: the template for the text of an example, with fields.
        examples: the fields of the examples before the first query.
        queries: the fields of each query, without the answer field.

    Returns:
        The fields of each query with its answer, in the order of `queries`.

    Raises:
        UserError: a field of the pattern is missing.
    """
    shown = [*examples]
    for query in queries:
        prompt = "".join(map(pattern.example, shown)) + pattern.query(query)
        shown.append({**query, pattern.answer_field: answer(prompt).strip()})
    return shown[len(examples) :]
