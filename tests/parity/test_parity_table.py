"""The table in docs/support.md has a row for each model compared with torch, and no other."""

import json
import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ..models.hf import test_bart, test_decoders, test_generate
from . import parity_table, test_bert_against_torch

MARIAN = ("MarianMTModel", "MarianModel")
DECODERS = {*map(test_decoders.class_name, test_decoders.FAMILIES)}
T5 = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration")
T5_BODIES = ("T5Model", "MT5Model")
BART = {
    f"{kind.get('model', 'Bart')}{kind.get('cls', test_bart.WRITES)}"
    for kind in test_bart.KINDS.values()
}
BART_BODIES = ("BartModel", "MBartModel", "PegasusModel")
# An mT5, and a body, is written as the T5 that it is; so is the body of an mBART.
READ_ONLY = {T5[1], *T5_BODIES, BART_BODIES[1]}
COMPARED = {
    *(test_bert_against_torch.class_name(*case) for case in test_bert_against_torch.CASES),
    *MARIAN,
    *DECODERS,
    *test_decoders.OTHER_CLASSES,
    *T5,
    *T5_BODIES,
    *BART,
    *BART_BODIES,
}
WRITING = {
    *(name for _, name, _ in test_generate.FAMILIES.values()),
    MARIAN[0],
    *DECODERS,
    *T5,
    *(name for name in BART if name.endswith(test_bart.WRITES)),
}


def rows():
    """The cells of each row of the table, by the name of the model."""
    found = parity_table.SECTION.search(parity_table.GUIDE.read_text(encoding="utf-8"))
    assert found
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in found[0].strip().splitlines()
    ]
    return {model.strip("`"): rest for _, _, model, *rest in lines[2:]}


def test_every_model_that_is_compared_has_a_row():
    assert rows().keys() == COMPARED


def test_both_directions_agree_and_what_writes_writes_the_same():
    for model, (imported, exported, tokens) in rows().items():
        assert float(imported) < 1e-5
        assert exported == "" if model in READ_ONLY else float(exported) < 1e-5
        assert tokens == ("equal" if model in WRITING else "")


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_the_pages_state_the_number_of_models_and_the_largest_difference(page):
    text = (parity_table.GUIDE.parents[1] / page).read_text(encoding="utf-8")
    differences = [cell for row in rows().values() for cell in row[:2] if cell]
    largest = max(differences, key=float)
    assert f"logits within {largest} of transformers 5 for {len(rows())} model classes" in (
        re.sub(r"\s+", " ", text.replace("logits are within", "logits within"))
    )


def test_every_test_that_notes_is_run_for_the_table():
    noting = {
        file.relative_to(parity_table.TESTS_FOLDER).as_posix()
        for file in parity_table.TESTS_FOLDER.rglob("test_*.py")
        if re.search(r"\bnote_(answers|tokens)\(", file.read_text(encoding="utf-8"))
    }
    assert noting == set(parity_table.TESTS)


def test_the_worst_of_several_is_reported():
    def line(what, difference, model="GPT2Model", family="gpt2"):
        fields = {"family": family, "model": model, "what": what, "difference": difference}
        return json.dumps(fields)

    lines = [
        line("import", 1e-7),
        line("import", 3.4e-6),
        line("export", 0.0),
        line("import", 2e-7, "BertLMHeadModel", "bert"),
        line("tokens", 0.0, "BertLMHeadModel", "bert"),
    ]
    assert parity_table.table(lines).splitlines()[2:] == [
        "| BERT | next token | `BertLMHeadModel` | 2e-7 |  | equal |",
        "| GPT-2 | none | `GPT2Model` | 3e-6 | 0e+00 |  |",
    ]
