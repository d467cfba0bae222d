"""Runs the tests that compare models with torch, and writes their table into docs/support.md.

From the root of the repository: `python -m tests.parity.parity_table`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
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


def table(lines: Iterable[str]) -> str:
    """A row for each model: the largest difference in either direction.

    Args:
      lines: as `support/parity.py` notes them.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in map(json.loads, lines):
        row = found.setdefault((line["family"], line["model"]), {})
        row[line["what"]] = max(row.get(line["what"], 0.0), line["difference"])
    order = sorted(found, key=lambda key: (list(NAMES).index(key[0]), _head_index(key[1])))
    head = "| family | head | model of transformers | import | export | tokens |\n"
    rows = (_row(family, model, found[family, model]) for family, model in order)
    return head + "| --- " * 6 + "|\n" + "".join(rows)


def _row(family: str, model: str, measured: dict[str, float]) -> str:
    cells = [
        f"{measured[name]:.0e}".replace("e-0", "e-") if name in measured else ""
        for name in ("import", "export")
    ]
    cells.append("equal" if "tokens" in measured else "")
    head = list(HEADS.values())[_head_index(model)]
    return f"| {NAMES[family]} | {head} | `{model}` | {' | '.join(cells)} |\n"


def _head_index(model: str) -> int:
    return next(i for i, end in enumerate(HEADS) if model.endswith(end))


def measured() -> list[str]:
    """What the tests note."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parity.jsonl"
        tests = [str(TESTS_FOLDER / name) for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-q", *tests]
        subprocess.run(
            command, env=os.environ | {FILE: str(file)}, cwd=TESTS_FOLDER.parent, check=True
        )
        return file.read_text().splitlines()


def main() -> None:
    """Replaces the table."""
    text = GUIDE.read_text(encoding="utf-8")
    new = table(measured())
    GUIDE.write_text(SECTION.sub(lambda _: new, text), encoding="utf-8")
    print(new)


if __name__ == "__main__":
    main()
