"""The stages of a run: `train(…, extend=True)` adds a stage, with settings that may differ.

The file `config.json` has the configuration of the last stage. The entry `stages` in this file
lists the steps, the configuration and the data fingerprints of each earlier stage.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ...data.common.atomic_io import write_file
from ...data.common.errors import RunError
from ...data.common.fields import require
from ...data.common.json_text import to_json
from ...data.dataset import ExampleSource
from ...data.mixture import MIXTURE, MixedExamples
from ...models.run_files import CHECKPOINTS, CONFIG_FILE, DATA, read_config, steps
from ..config import Stage, TrainConfig, flatten, in_steps, is_below, to_dict, warmup_of
from .config_json import from_dict

STAGES = "stages"
"""The key in `config.json` for the earlier stages."""
SCHEDULE = (
    *("schedule", "peak_learning_rate", "warmup_steps", "warmup_fraction"),
    *("final_fraction", "decay_fraction"),
)
ENDLESS = ("constant", "inverse_sqrt")
"""The schedules that do not depend on the length of the run."""
CHANGEABLE = (
    *("steps", "epochs", "batch_size", "data", "execution.dtype"),
    *(f"optimizer.{name}" for name in SCHEDULE),
    *("optimizer.weight_decay", "optimizer.max_gradient_norm"),
)
"""The fields that a stage may change, including all fields nested in them."""
FIXED = ("data.kind", "data.tokenizer")
"""Exceptions to `CHANGEABLE`."""


def check_extension(
    old: TrainConfig, changed: Mapping[str, tuple[object, object]], folder: Path, new_steps: int
) -> None:
    """Checks that a new stage can be added to a run.

    Args:
        old: The stored configuration.
        changed: The fields that differ, each with its old and its new value.
        folder: The run folder.
        new_steps: The last step of the new stage; 0 if the stage is given in epochs.

    Raises:
        RunError: A field differs that a stage may not change, the run has no checkpoint, or the
          stage would have no steps.
    """
    for name, (before, after) in changed.items():
        require(
            is_below(name, CHANGEABLE) and not is_below(name, FIXED),
            f"{name} cannot change in an extension, got {before!r} → {after!r}: leave it out, or "
            f"begin a new run with --init-from {folder}",
            error=RunError,
        )
    # A new stage begins at the newest checkpoint, and must have at least one step after it.
    kept = steps(folder)
    require(
        kept,
        f"{folder} has no checkpoint yet, so it cannot be extended: wait for its first "
        f"checkpoint, or give another --workdir",
        error=RunError,
    )
    require(
        new_steps > kept[-1],
        f"the last step of an extension must be above {kept[-1]}, the newest checkpoint of "
        f"{folder}, got {new_steps}: give more steps (--extend-to)",
        error=RunError,
    )


def data_position(
    old: TrainConfig,
    new: TrainConfig,
    folder: Path,
    examples: ExampleSource,
    *,
    same_data: bool,
    same_settings: bool,
) -> Stage:
    """Returns a stage that begins at the newest checkpoint, with its position in the data.

    Args:
        old: The stored configuration, which is the configuration of the previous stage.
        new: The configuration of the new stage.
        folder: The run folder.
        examples: The training examples of the new stage.
        same_data: Whether the training examples are the same as in the previous stage, so that
          their order continues.
        same_settings: Whether the settings that turn texts into examples are the same.
    """
    start, before = steps(folder)[-1], old.stage or Stage()
    read = before.examples + (start - before.start) * old.batch_size
    if same_data:
        # Continue after the examples that the run has already read.
        return dataclasses.replace(before, start=start, examples=read)
    if not same_settings:
        return Stage(start=start)
    # Sources may join or leave a mixture, and weights may change. A source that is in both stages
    # continues after the examples that it has already given.
    mixture = _data_state(folder, start).get(MIXTURE)
    if isinstance(examples, MixedExamples):
        sizes = {part.name: part.examples.num_examples for part in examples.parts}
        counts = {old.data.source_name: read} if mixture is None else _counts(mixture, sizes)
        return Stage(start=start, examples_of_sources=tuple(counts.get(x, 0) for x in sizes))
    name = new.data.source_name
    counts = _counts(mixture or (), {name: examples.num_examples})
    return Stage(start=start, examples=counts.get(name, 0))


def _data_state(folder: Path, step: int) -> Mapping[str, Any]:
    """Returns the state of the data iterator in a checkpoint; see `BatchIterator.get_state`."""
    import orbax.checkpoint as ocp
    from etils import epath

    return ocp.JsonCheckpointHandler().restore(epath.Path(folder / CHECKPOINTS / str(step) / DATA))


def _counts(positions: Iterable[Mapping[str, Any]], sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns how many examples a run has read from each source.

    Args:
        positions: The positions of the sources; see `MixedExamples.positions`.
        sizes: Maps the name of each source to its number of examples. Other sources are left out.
    """
    return {
        x["source"]: x["epoch"] * sizes[x["source"]] + x["example"]
        for x in positions
        if x["source"] in sizes
    }


def next_stage(old: TrainConfig, new: TrainConfig, position: Stage, num_examples: int) -> Stage:
    """Returns a new stage with the start of its schedule.

    Args:
        old: The stored configuration, which is the configuration of the previous stage.
        new: The configuration of the new stage.
        position: The stage that `data_position` returns.
        num_examples: The number of training examples.
    """
    changed = [x for x in SCHEDULE if getattr(old.optimizer, x) != getattr(new.optimizer, x)]
    if not changed and old.optimizer.schedule in ENDLESS:
        # Continue the schedule. The run is then equal to a run that was configured with more steps
        # from the start.
        warmup = in_steps(old, num_examples).optimizer.warmup_steps
        begun = (old.stage or Stage()).schedule_start
        return dataclasses.replace(position, schedule_start=begun, warmup=warmup)
    # Any other schedule restarts. It begins at the peak learning rate, unless the new stage changes
    # the warm-up.
    rewarmed = not {"warmup_steps", "warmup_fraction"}.isdisjoint(changed)
    start = position.start
    warmup = warmup_of(new.optimizer, new.steps - start) if rewarmed else 0
    return dataclasses.replace(position, schedule_start=start, warmup=warmup)


def earlier_stages(folder: Path) -> list[dict[str, Any]]:
    """Returns all stages before the last stage, each with `start`, `end` and `train`."""
    return cast(list[dict[str, Any]], read_config(folder).get(STAGES, []))


def last_trained(folder: Path, stored: TrainConfig) -> tuple[TrainConfig, Mapping[str, object]]:
    """Returns the configuration and the fingerprints of the last stage that has a checkpoint.

    Args:
        folder: The run folder.
        stored: The stored configuration. Its stage may not have a checkpoint yet.
    """
    fields, earlier = read_config(folder), earlier_stages(folder)
    newest = max(steps(folder), default=0)
    if stored.stage is None or not earlier or stored.stage.start < newest:
        return stored, cast(Mapping[str, object], fields["data_fingerprints"])
    last = earlier[-1]
    return from_dict({**last["train"], "model": fields["model"]}), last["data_fingerprints"]


def add_stage(folder: Path, config: TrainConfig, fingerprints: Mapping[str, str]) -> None:
    """Writes `config` as the configuration of the last stage into the `config.json` of a run.

    Raises:
        DataError: The file cannot be written.
    """
    fields, stage = read_config(folder), cast(Stage, config.stage)
    old = {"train": fields["train"], "data_fingerprints": fields["data_fingerprints"]}
    finished = earlier_stages(folder)
    start = finished[-1]["end"] if finished else 0
    # Do not record a stage that ended before its first step.
    if start != stage.start:
        finished.append({"start": start, "end": stage.start, **old})
    train = to_dict(config)
    del train["model"]
    content = {**fields, "train": train, "data_fingerprints": fingerprints, STAGES: finished}
    write_file(folder / CONFIG_FILE, f"{to_json(content, indent=2)}\n".encode())


def described_stages(folder: Path, config: TrainConfig) -> dict[str, str]:
    """Returns a row for each stage in the report, or no rows if the run has a single stage."""
    finished = earlier_stages(folder)
    if not finished:
        return {}
    last = to_dict(config)
    del last["model"]
    stages = [*finished, {"start": finished[-1]["end"], "end": config.steps, "train": last}]
    changes = ["the initial settings"]
    for before, now in itertools.pairwise(flatten(stage["train"]) for stage in stages):
        changes.append(", ".join(_changes(before, now)) or "no changes")
    return {
        f"stage {number}": f"steps {stage['start'] + 1:,} to {stage['end']:,}: {change}"
        for number, (stage, change) in enumerate(zip(stages, changes, strict=True), 1)
    }


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    """Yields the settings that a stage changes, except its length and its position."""
    for name in now:
        if not is_below(name, ("steps", "epochs", "stage")) and before.get(name) != now[name]:
            yield f"{name} {before.get(name)} → {now[name]}"
