"""The `README.md` of an exported model: what it is, what it was trained on, how well it does."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

from ...models.nn.heads import HEADS
from ...models.registry import family_name
from ..config import OPERATIONAL_FIELDS, TrainConfig, flatten, to_dict
from ..engine.metrics_log import read_metrics
from ..runs.params_only_run import AVERAGED_STEPS, IMPORTED_FROM

FILE = "README.md"


def model_card(
    name: str,
    config: TrainConfig,
    facts: dict[str, Any],
    folder: Path,
    step: int | None,
    num_parameters: int,
    notes: list[str],
) -> str:
    """The text of the card.

    Args:
      name: of the model.
      config: what it was trained by.
      facts: the `config.json` of its folder.
      folder: whose `metrics.jsonl` has its scores.
      step: the exported checkpoint; None: it was not trained here.
      num_parameters: how many it has.
      notes: what else there is to know, a line each.
    """
    model: Any = config.model
    head = HEADS[model.head]
    made = f"{family_name(model)}, head {model.head}, {num_parameters:,} parameters"
    base = f"base_model: {_public(config.init_from)}\n" if config.init_from else ""
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: {head.hub_task}\n"
        f"{base}tags:\n- flaxzoo\n---\n",
        f"# {name}\n\n{made}. {_origin(facts, step)}\n",
        "```python\n"
        f"from transformers import {head.hf_auto_class}, AutoTokenizer\n\n"
        f'model = {head.hf_auto_class}.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n',
        *(f"{note}\n" for note in notes),
    ]
    if "train" in facts and IMPORTED_FROM not in facts:
        parts += [_data(config), _settings(config), _scores(folder, step)]
    return "\n".join(parts)


def _origin(facts: dict[str, Any], step: int | None) -> str:
    with_version = f"flaxzoo {facts.get('flaxzoo', importlib.metadata.version('flaxzoo'))}"
    if IMPORTED_FROM in facts:
        return f"Imported by {with_version} from `{_public(facts[IMPORTED_FROM])}`."
    if AVERAGED_STEPS in facts:
        steps = ", ".join(map(str, facts[AVERAGED_STEPS]))
        return f"Trained by {with_version}: the mean of its checkpoints {steps}."
    return f"Trained by {with_version}, step {step}." if step is not None else ""


def _data(config: TrainConfig) -> str:
    data = to_dict(config)["data"]
    idle = {"num_workers", "tokenizer"}  # the vocabulary is there for all to see
    if data["validation"] is not None:
        idle.add("validation_fraction")
    return "## Training data\n\n" + _table({n: x for n, x in data.items() if n not in idle})


def _settings(config: TrainConfig) -> str:
    fields = to_dict(config)
    del fields["data"], fields["model"]
    del fields["epochs" if fields["steps"] else "steps"]  # the other counts
    settings = {k: v for k, v in flatten(fields).items() if not k.startswith(OPERATIONAL_FIELDS)}
    return "## Recipe\n\n" + _table(settings)


def _scores(folder: Path, step: int | None) -> str:
    rows = read_metrics(folder, "validation")
    row = next((row for row in reversed(rows) if row["step"] == step), None)
    if row is None:
        return "## Scores\n\nThe run folder has none of this checkpoint.\n"
    scores = {name: x for name, x in row.items() if name not in ("step", "split")}
    return f"## Scores\n\nOn the validation data, at step {step}:\n\n" + _table(scores)


def _table(rows: dict[str, Any]) -> str:
    lines = [f"| {name} | {_shown(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *lines]) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else _public(str(value)).replace("|", "\\|").replace("\n", " ")


def _public(text: str) -> str:
    """A source or a path without the folders of the machine it was on."""
    return re.sub(r"(?<![\w.])/(?:[^/\s,#]+/)*", "", text)
