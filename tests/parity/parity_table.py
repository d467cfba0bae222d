"""Writes the table of differences between flaxzoo and torch into docs/support.md.

From the root of the repository:

    python -m tests.parity.parity_table         # runs the tests, and writes the whole table
    python -m tests.parity.parity_table FILE    # raises figures to larger differences in FILE

If the environment variable FLAXZOO_PARITY names a file, the tests write their differences into it.
The second form reads this file, also after a run of only some of the tests.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..support.parity import FILE

TESTS_FOLDER = Path(__file__).parents[1]
GUIDE = TESTS_FOLDER.parent / "docs" / "support.md"
TESTS = (
    "models/hf/test_bart.py",
    "models/hf/test_decoders.py",
    "models/hf/test_generate.py",
    "models/hf/test_marian.py",
    "models/hf/test_t5.py",
    "parity/test_bert_against_torch.py",
    "parity/test_sharded_gradients_and_vectors_against_torch.py",
    "parity/test_transformer_against_torch.py",
)
SECTION = re.compile(r"(?<=<!-- parity -->\n).*?(?=<!-- /parity -->)", re.DOTALL)
NAMES = {
    "bert": "BERT",
    "roberta": "RoBERTa",
    "distilbert": "DistilBERT",
    "electra": "ELECTRA",
    "xlm-roberta": "XLM-R",
    "camembert": "CamemBERT",
    "roberta-prelayernorm": "RoBERTa-PreLayerNorm",
    "mpnet": "MPNet",
    "modernbert": "ModernBERT",
    "deberta": "DeBERTa",
    "deberta-v2": "DeBERTa v2, v3",
    "albert": "ALBERT",
    "nomic_bert": "Nomic BERT",
    "gte": "GTE",
    "openai-gpt": "GPT",
    "gpt2": "GPT-2",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "phi3": "Phi-3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "smollm3": "SmolLM3",
    "granite": "Granite",
    "stablelm": "StableLM",
    "gpt_neo": "GPT-Neo",
    "gptj": "GPT-J",
    "gpt_neox": "GPT-NeoX",
    "opt": "OPT",
    "bloom": "BLOOM",
    "falcon": "Falcon",
    "marian": "Marian",
    "pegasus": "Pegasus",
    "t5": "T5",
    "mt5": "mT5",
    "bart": "BART",
    "mbart": "mBART",
}
HEADS = {  # by how names of models end
    "ElectraForPreTraining": "replaced tokens",
    "AlbertForPreTraining": "masked words and sentence order",
    "ForPreTraining": "masked words and next sentence",
    "ForMaskedLM": "masked words",
    "ForNextSentencePrediction": "next sentence",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "span",
    "ForMultipleChoice": "choice",
    "ForCausalLM": "next token",
    "LMHeadModel": "next token",
    "MTModel": "next token",
    "ForConditionalGeneration": "next token",
    "Model": "none",
}


COLUMNS = ("import", "export", "gradients", "tokens", "vectors", "devices")
"""What the tests note, in the order of the columns."""
HEADINGS = ("family", "head", "model of transformers", *COLUMNS)

Rows = dict[tuple[str, str], dict[str, float]]
"""Family and class → what was measured → the largest difference."""


def table(lines: Iterable[str], rows: Mapping[tuple[str, str], Mapping[str, float]] = {}) -> str:
    """Returns a table with a row for each class, and the largest difference of each kind.

    Args:
      lines: as `support/parity.py` notes them.
      rows: the differences of an earlier table, from `rows_of`.
    """
    found: Rows = {key: dict(row) for key, row in rows.items()}
    for line in map(json.loads, lines):
        row = found.setdefault((NAMES[line["family"]], line["model"]), {})
        row[line["what"]] = max(row.get(line["what"], 0.0), line["difference"])
    families = list(NAMES.values())
    order = sorted(found, key=lambda key: (families.index(key[0]), _head_index(key[1])))
    cells = [HEADINGS, ("---",) * len(HEADINGS), *(_row(*key, found[key]) for key in order)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def rows_of(text: str) -> Rows:
    """Returns the differences in the table of a page."""
    found = SECTION.search(text)
    assert found
    rows: Rows = {}
    for line in found[0].splitlines()[2:]:
        family, _, model, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        stated = zip(COLUMNS, cells, strict=True)
        rows[family, model.strip("`")] = {
            what: 0.0 if cell == "equal" else float(cell) for what, cell in stated if cell
        }
    return rows


def _row(family: str, model: str, measured: Mapping[str, float]) -> tuple[str, ...]:
    cells = [
        "" if what not in measured else "equal" if what == "tokens" else _rounded(measured[what])
        for what in COLUMNS
    ]
    head = list(HEADS.values())[_head_index(model)]
    return family, head, f"`{model}`", *cells


def _rounded(difference: float) -> str:
    return f"{difference:.0e}".replace("e-0", "e-") if difference else "0"


def _head_index(model: str) -> int:
    return next(i for i, end in enumerate(HEADS) if model.endswith(end))


def measured() -> list[str]:
    """What the tests note."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parity.jsonl"
        tests = [str(TESTS_FOLDER / name) for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-q", "--all", *tests]
        subprocess.run(
            command, env=os.environ | {FILE: str(file)}, cwd=TESTS_FOLDER.parent, check=True
        )
        return file.read_text().splitlines()


def main(arguments: list[str]) -> None:
    """Replaces the table, or raises figures of the table."""
    text = GUIDE.read_text(encoding="utf-8")
    if arguments:
        (file,) = arguments
        new = table(Path(file).read_text(encoding="utf-8").splitlines(), rows_of(text))
    else:
        new = table(measured())
    GUIDE.write_text(SECTION.sub(lambda _: new, text), encoding="utf-8")
    print(new)


if __name__ == "__main__":
    main(sys.argv[1:])
