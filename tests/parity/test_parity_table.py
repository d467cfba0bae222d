"""The table in docs/support.md has a row for each model compared with torch, and no other."""

import json
import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ..models.hf import test_bart, test_decoders, test_generate
from . import parity_table, test_bert_against_torch
from . import test_sharded_gradients_and_vectors_against_torch as test_families

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


@pytest.fixture(scope="module")
def stated():
    """What the table states for each class."""
    text = parity_table.GUIDE.read_text(encoding="utf-8")
    return {model: row for (_, model), row in parity_table.rows_of(text).items()}


def test_every_model_that_is_compared_has_a_row(stated):
    assert stated.keys() == COMPARED


def test_both_directions_agree_and_what_writes_writes_the_same(stated):
    for model, row in stated.items():
        assert all(difference < 1e-5 for difference in row.values())
        assert "import" in row
        assert ("export" in row) == (model not in READ_ONLY)
        assert ("tokens" in row) == (model in WRITING)


def test_every_family_has_gradients_and_those_that_embed_have_vectors(stated):
    families = {
        key: {name for name, row in stated.items() if key in row}
        for key in ("gradients", "devices", "vectors")
    }
    made = {class_of(family) for family in test_families.MADE}
    assert families["devices"] == made
    assert families["gradients"] >= made
    seq2seq = {"MarianMTModel", *(name for name in made if name.endswith(test_bart.WRITES))}
    assert families["vectors"] == made - seq2seq


def class_of(family):
    """The class of the model that the tests of all families make."""
    if family in test_bert_against_torch.FAMILIES:
        return test_bert_against_torch.class_name(family, "masked_lm")
    if family in test_families.DECODERS:
        return test_decoders.class_name(family)
    return MARIAN[0] if family == "Marian" else f"{family}{test_bart.WRITES}"


def largest(stated, *columns):
    """The largest difference in these columns, as the pages write it."""
    differences = (row[what] for row in stated.values() for what in columns if what in row)
    return f"{max(differences):.0e}".replace("e-0", "e-")


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_the_pages_state_the_number_of_models_and_the_largest_difference(stated, page):
    text = (parity_table.GUIDE.parents[1] / page).read_text(encoding="utf-8")
    outputs = largest(stated, "import", "export")
    assert f"logits within {outputs} of transformers 5 for {len(stated)} model classes" in (
        re.sub(r"\s+", " ", text.replace("logits are within", "logits within"))
    )


def test_the_results_state_the_largest_differences_of_gradients_and_vectors(stated):
    text = (parity_table.GUIDE.parent / "results.md").read_text(encoding="utf-8")
    gradients, devices, vectors = (
        (largest(stated, what), sum(what in row for row in stated.values()))
        for what in ("gradients", "devices", "vectors")
    )
    assert (
        f"gradients within {gradients[0]} of transformers 5 for a model class of each of "
        f"{devices[1]} architectures, and within {devices[0]} if eight devices compute them; "
        f"vectors of texts within {vectors[0]} for {vectors[1]} architectures"
    ) in text


def test_every_test_that_notes_is_run_for_the_table():
    noting = {
        file.relative_to(parity_table.TESTS_FOLDER).as_posix()
        for file in parity_table.TESTS_FOLDER.rglob("test_*.py")
        if re.search(r"\bnote_(answers|gradients|tokens)\(", file.read_text(encoding="utf-8"))
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
    bert = "| BERT | next token | `BertLMHeadModel` | 2e-7 |  |  | equal |  |  |"
    gpt2 = "| GPT-2 | none | `GPT2Model` | 3e-6 | 0 |  |  |  |  |"
    table = parity_table.table(lines)
    assert table.splitlines()[2:] == [bert, gpt2]

    # A run of some tests adds to the table, and lowers nothing.
    stated = parity_table.rows_of(f"<!-- parity -->\n{table}<!-- /parity -->")
    new = [line("import", 1e-6), line("export", 2e-7), line("devices", 5e-7)]
    assert parity_table.table(new, stated).splitlines()[2:] == [
        bert,
        "| GPT-2 | none | `GPT2Model` | 3e-6 | 2e-7 |  |  |  | 5e-7 |",
    ]
