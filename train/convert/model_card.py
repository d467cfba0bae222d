"""Writes the `README.md` of an exported model: its kind, training data, recipe and scores."""

import dataclasses
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...data.common.json_text import JsonObject
from ...models.heads.specs import HEADS, HeadSpec
from ...models.registry import family_name
from ...models.run_files import IMPORTED_FROM
from ..config import OPERATIONAL_FIELDS, TrainConfig, flatten, to_dict
from ..runs.custom import custom_names
from ..runs.metrics_log import read_metrics
from ..runs.params_only_run import AVERAGED_STEPS, SAVED_FROM_PYTHON

FILE = "README.md"


@dataclasses.dataclass(frozen=True)
class SentenceUsage:
    """The parts of a model card that are specific to a class of sentence-transformers."""

    hub_task: str
    example: str
    """A section with an example; {} is replaced by the name of the model."""


USAGES = {
    "SentenceTransformer": SentenceUsage(
        "sentence-similarity",
        """Vectors of texts:

```python
from sentence_transformers import SentenceTransformer

vectors = SentenceTransformer("{}").encode(["A text.", "Another."])
```
""",
    ),
    "CrossEncoder": SentenceUsage(
        "text-ranking",
        """Scores of pairs of texts:

```python
from sentence_transformers import CrossEncoder

scores = CrossEncoder("{}").predict([("A question?", "A passage."), ("A question?", "Another.")])
```
""",
    ),
    "SparseEncoder": SentenceUsage(
        "feature-extraction",
        """Sparse vectors of texts:

```python
from sentence_transformers import SparseEncoder

vectors = SparseEncoder("{}").encode(["A text.", "Another."])
```
""",
    ),
}
"""Maps the name of each sentence-transformers class to its parts of the model card."""


def model_card(
    name: str,
    config: TrainConfig,
    *,
    stored_fields: JsonObject,
    folder: Path,
    step: int | None,
    num_parameters: int,
    sentence_class: str | None,
    notes: Sequence[str],
    adapter_base: str | None = None,
) -> str:
    """Returns the text of the model card.

    Args:
        name: The name of the model.
        config: The configuration of the run that trained the model.
        stored_fields: The content of `config.json` in the model's folder.
        folder: The model's folder, whose `metrics.jsonl` contains the scores.
        step: The exported checkpoint, or None if flaxzoo did not train the model.
        num_parameters: The number of the model's parameters.
        sentence_class: The sentence-transformers class that loads the export (a key of `USAGES`),
          or None.
        notes: Notes to include in the card, one line each.
        adapter_base: The base model of exported adapters, or None if a whole model is exported.
    """
    model = config.model
    head = HEADS[model.head]
    summary = f"{family_name(model)}, head {model.head}, {num_parameters:,} parameters"
    origin = adapter_base or config.init_from
    base = f"base_model: {_without_folders(origin)}\n" if origin else ""
    library, task = "transformers" if adapter_base is None else "peft", head.hub_task
    sections = [f"{note}\n" for note in notes]
    if sentence_class is not None:
        usage = USAGES[sentence_class]
        library, task = "sentence-transformers", usage.hub_task
        sections.append(usage.example.format(name))
    # The card begins with the metadata for the hub, the title, and the code that loads the model.
    parts = [
        f"---\nlibrary_name: {library}\npipeline_tag: {task}\n{base}tags:\n- flaxzoo\n---\n",
        f"# {name}\n\n{summary}. {_origin(stored_fields, step)}\n",
        _loading(name, head, adapter_base),
        *sections,
    ]
    # A model that was imported, or saved from Python, has no training run to describe.
    if "train" in stored_fields and not {IMPORTED_FROM, SAVED_FROM_PYTHON} & stored_fields.keys():
        data, custom = _data(config), dict(custom_names(stored_fields))
        function = custom.pop("examples", None)
        if function is not None:
            data = f"## Training data\n\nExamples made in Python by `{function}`.\n"
        parts += [data, _settings(config, custom), _scores(folder, step)]
    return "\n".join(parts)


def _loading(name: str, head: HeadSpec, adapter_base: str | None) -> str:
    """Returns the Python code that loads the model."""
    imports, loads = "", f'{head.hf_auto_class}.from_pretrained("{name}")'
    names = f"{head.hf_auto_class}, AutoTokenizer"
    if adapter_base is not None and head.peft_task == "CAUSAL_LM":
        imports, names = "from peft import AutoPeftModelForCausalLM\n", "AutoTokenizer"
        loads = f'AutoPeftModelForCausalLM.from_pretrained("{name}")'
    elif adapter_base is not None:
        imports = "from peft import PeftModel\n"
        base = f'{head.hf_auto_class}.from_pretrained("{_without_folders(adapter_base)}")'
        loads = f'PeftModel.from_pretrained({base}, "{name}")'
    return (
        f"```python\n{imports}from transformers import {names}\n\nmodel = {loads}\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n'
    )


def _origin(stored_fields: JsonObject, step: int | None) -> str:
    """Returns a sentence about the origin of the model."""
    version = stored_fields.get("flaxzoo", importlib.metadata.version("flaxzoo"))
    if IMPORTED_FROM in stored_fields:
        source = _without_folders(str(stored_fields[IMPORTED_FROM]))
        return f"Imported by flaxzoo {version} from `{source}`."
    if SAVED_FROM_PYTHON in stored_fields:
        return f"Saved by flaxzoo {version}."
    averaged = stored_fields.get(AVERAGED_STEPS)
    if isinstance(averaged, list):
        steps = ", ".join(map(str, averaged))
        return f"Trained by flaxzoo {version}: the mean of its checkpoints {steps}."
    return f"Trained by flaxzoo {version}, step {step}." if step is not None else ""


def _data(config: TrainConfig) -> str:
    """Returns the section about the training data."""
    data = to_dict(config)["data"]
    # The tokenizer is part of the export, so its settings need no description.
    left_out = {"num_workers", "tokenizer"}
    # The validation fraction has no effect if there is a separate validation source.
    if data["validation"] is not None:
        left_out.add("validation_fraction")
    return "## Training data\n\n" + _table({n: x for n, x in data.items() if n not in left_out})


def _settings(config: TrainConfig, custom: Mapping[str, object]) -> str:
    """Returns the section about the settings, which begins with the custom functions."""
    fields = to_dict(config)
    # A custom objective replaces the configured objective.
    if "objective" in custom:
        del fields["objective"]
    del fields["data"], fields["model"]
    # A run uses either `steps` or `epochs`, so leave the other out.
    del fields["epochs" if fields["steps"] else "steps"]
    settings = {k: v for k, v in flatten(fields).items() if not k.startswith(OPERATIONAL_FIELDS)}
    own = {f"own {what}": name for what, name in custom.items()}
    return "## Recipe\n\n" + _table(own | settings)


def _scores(folder: Path, step: int | None) -> str:
    rows = {row["step"]: row for row in read_metrics(folder, "validation")}
    if step not in rows:
        return "## Scores\n\nThe run folder has no scores of this checkpoint.\n"
    scores = {name: x for name, x in rows[step].items() if name not in ("step", "split")}
    return f"## Scores\n\nOn the validation data, at step {step}:\n\n" + _table(scores)


def _table(rows: Mapping[str, object]) -> str:
    """Returns a Markdown table of names and values."""
    lines = ["| | |", "| --- | --- |"]
    for name, value in rows.items():
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        shown = "" if value is None else _without_folders(shown)
        # A cell of a Markdown table must contain neither a pipe nor a line break.
        shown = shown.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {shown} |")
    return "\n".join(lines) + "\n"


def _without_folders(text: str) -> str:
    """Shortens each absolute path to its last part, because folder names may be private."""
    return re.sub(r"(?<![\w.])/(?:[^/\s,#]+/)*", "", text)
