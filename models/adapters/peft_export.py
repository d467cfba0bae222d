"""Writes adapters in the format of the package peft.

If the Hugging Face format joins several linear maps, such as GPT-2's queries, keys and values, our
adapters of rank r become one equivalent adapter. Its rank is a multiple of r: the matrices A are
stacked, and the matrices B become blocks of the new B.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ...data.common.atomic_io import new_folder
from ...data.common.fields import require
from ...data.common.json_text import JsonObject, JsonValue
from ..config import TransformerConfig
from ..heads.specs import HEADS
from ..hf.registry import mapping_of
from ..hf.save_weights import write_json
from ..hf.tensors.export import rule_tensors
from ..hf.tensors.mapping import TensorMapping, TensorRule, WeightsError
from ..model import Model
from ..nn.typing import Params
from ..registry import create
from .lora import HEAD, A, B, LinearMap, LoRA, by_path, linear_maps, scale_divisor
from .peft import CONFIG, FACTORS, KERNEL, PREFIX, WEIGHT, WEIGHTS, module_mapping

LORA_A, LORA_B = FACTORS["linear"]
"""The suffixes that follow a module's name in the tensor names of A and B."""
VALUE_HEAD = "head/value/"
"""The path prefix of the value head, which is only used in training and is not exported."""


@dataclasses.dataclass(frozen=True)
class _Adapter:
    """Adapters of one linear map in the Hugging Face format, or of the same map in all layers."""

    module: str
    """The name of the map. A name with `{i}` names one map in each layer."""
    a: np.ndarray
    """`[L, r, in]`."""
    b: np.ndarray
    """`[L, out, r]`."""
    is_conv1d: bool
    """Whether the first axis of the map's matrix is the input axis."""
    inner: int = 1
    """Number of values of `{j}` for each value of `{i}`; see `TensorRule`."""

    @property
    def modules(self) -> list[str]:
        """The names of the map in each layer."""
        numbers = (divmod(layer, self.inner) for layer in range(len(self.a)))
        return [self.module.format(i=i, j=j) for i, j in numbers]

    @property
    def rank(self) -> int:
        return self.a.shape[1]


def save_adapter(
    folder: str | Path, model: Model, lora: LoRA, trained: Params, *, base: str | None = None
) -> None:
    """Saves adapters as a folder that `PeftModel.from_pretrained` of the package peft loads.

    Example::

        models.save_adapter("adapter", model, lora, state.params, base="gpt2")
        # peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("gpt2"), "adapter")

    Args:
        folder: The folder to create, atomically; it may exist if it is empty.
        model: The model.
        lora: Its adapters.
        trained: The parameters that were trained, as in `TrainState.params`.
        base: The name or the path of the base in the Hugging Face format, for programs that load
          the adapter.

    Raises:
        UserError: The folder is not empty, transformers has no such model, or one of its modules
            is partly frozen and partly trained.
    """
    new_folder(Path(folder), lambda path: write_adapter(path, model, lora, trained, base=base))


def write_adapter(
    folder: Path, model: Model, lora: LoRA, trained: Params, *, base: str | None
) -> None:
    """Writes the files of `save_adapter` into an existing folder."""
    # Convert to the equivalent model that transformers has, and flatten its trained parameters.
    config, flat = _as_exported(model.config, trained)
    mapping = module_mapping(config)
    maps = linear_maps(create(config))
    # Reject parameters without a tensor, except the value head, which only training needs.
    needed = {*lora.whole, *(f"{m.path}{KERNEL}" for m in lora.maps)}
    unknown = {path for path in needed - mapping.paths if not path.startswith(VALUE_HEAD)}
    if unknown:
        raise WeightsError(
            f"{min(unknown)} is trained and transformers has no such tensor: export the model in "
            "another form"
        )
    # Collect the factors of adapted maps, and the parameters that were fully trained.
    adapters = [*filter(None, (_adapter_of(rule, flat, maps) for rule in mapping.rules))]
    whole = _whole_rules(mapping, lora)
    copies = (tensor for rule in whole for tensor in rule_tensors(rule, flat))
    tensors = dict(_adapter_tensors(adapters)) | {PREFIX + x.name: x.make() for x in copies}
    fields = _peft_config(adapters, mapping, lora) | {
        "base_model_name_or_path": base,
        "task_type": _task(config.head, lora),
        "modules_to_save": sorted({_saved_module(rule) for rule in whole}) or None,
    }

    from safetensors.numpy import save_file

    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    write_json(folder / CONFIG, fields)


def _task(head: str, lora: LoRA) -> str | None:
    """Returns the task that `adapter_config.json` states, or None.

    For a task with a new head, peft requires the tensors of this head. If no task is stated, peft
    keeps the head of the base model.
    """
    task = HEADS[head].peft_task
    trained = any(path.startswith(HEAD) for path in lora.whole)
    return task if trained or task not in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS") else None


def _as_exported(
    config: TransformerConfig, trained: Params
) -> tuple[TransformerConfig, Mapping[str, np.ndarray]]:
    """Returns the configuration that an export writes, and the trained parameters by path."""
    equivalent, params = mapping_of(config).to_hf_equivalent(config, trained)
    flat, given = by_path(params), by_path(trained)
    return equivalent, {path: np.asarray(flat[path], np.float32) for path in given}


def _adapter_of(
    rule: TensorRule, flat: Mapping[str, np.ndarray], maps: Mapping[str, LinearMap]
) -> _Adapter | None:
    """Returns the adapter of the tensor that a rule describes, or None."""
    paths = [path.removesuffix(KERNEL) for path in rule.flax]
    parts = [*filter(None, map(maps.get, paths))]
    adapted = [part for part, m in enumerate(parts) if f"{m.path}/{A}" in flat]
    if not adapted:
        return None
    require(
        rule.layers is None,
        f"{rule.hf} is in some layers only, whose adapters cannot be exported: merge them, or "
        "train with other lora.targets",
        WeightsError,
    )
    # Collect the factors for each linear map in the tensor.
    all_a, all_b = zip(*(_factors(parts[part], flat) for part in adapted), strict=True)
    # Each map gets a separate block of rows of the joint A.
    a = np.concatenate(all_a, axis=1)  # [L, n · r, in]
    starts = range(0, a.shape[1], all_a[0].shape[1])
    # Put each map's B into its block of the joint B, with outputs in the order of the kernel.
    wide = [np.zeros((len(a), a.shape[1], *m.outputs), np.float32) for m in parts]
    for part, x, start in zip(adapted, all_b, starts, strict=True):
        wide[part][:, start : start + x.shape[1]] = x
    outputs_first = dataclasses.replace(rule.layout, input_axes=1, transposed=True)
    b = np.stack(list(map(outputs_first.join, zip(*wide, strict=True))))
    return _Adapter(rule.hf.removesuffix(WEIGHT), a, b, not rule.layout.transposed, rule.inner)


def _factors(m: LinearMap, flat: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns A of an adapter as `[L, r, in]`, as peft stores it, and B as `[L, r, *outputs]`."""
    a, b = flat[f"{m.path}/{A}"], flat[f"{m.path}/{B}"]
    rank = a.shape[-1]
    a = a.reshape(-1, math.prod(m.inputs), rank).swapaxes(1, 2)
    return a, b.reshape(-1, rank, *m.outputs)


def _adapter_tensors(adapters: Sequence[_Adapter]) -> Iterator[tuple[str, np.ndarray]]:
    for adapter in adapters:
        for module, a, b in zip(adapter.modules, adapter.a, adapter.b, strict=True):
            yield f"{PREFIX}{module}.{LORA_A}", np.ascontiguousarray(a)
            yield f"{PREFIX}{module}.{LORA_B}", np.ascontiguousarray(b)


def _peft_config(adapters: Sequence[_Adapter], mapping: TensorMapping, lora: LoRA) -> JsonObject:
    """Returns the fields of `adapter_config.json` that describe the adapters and their modules."""
    targets = {adapter.module: _targets(adapter, adapters, mapping) for adapter in adapters}
    # The most frequent rank is the default; patterns list the modules with other ranks.
    (usual, _), *_ = collections.Counter(adapter.rank for adapter in adapters).most_common()
    ranks = {
        name: adapter.rank
        for adapter in adapters
        for name in targets[adapter.module]
        if adapter.rank != usual
    }
    c = lora.config

    def alpha(rank: int) -> float:  # chosen so that the scale stays the same
        return c.scale * scale_divisor(rank, c.use_rslora)

    names = sorted({*itertools.chain(*targets.values())})
    return {
        "peft_type": "LORA",
        "r": usual,
        "lora_alpha": alpha(usual),
        "lora_dropout": c.dropout_rate,
        "use_rslora": c.use_rslora,
        "target_modules": list[JsonValue](names),
        "rank_pattern": dict(ranks),
        "alpha_pattern": {name: alpha(rank) for name, rank in ranks.items()},
        "fan_in_fan_out": all(adapter.is_conv1d for adapter in adapters),
        "bias": "none",
        "use_dora": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _targets(adapter: _Adapter, adapters: Sequence[_Adapter], mapping: TensorMapping) -> list[str]:
    """Returns the shortest name suffixes that match a module in every layer and no other module."""
    adapted = {a.module for a in adapters if a.rank == adapter.rank}
    modules = [rule.hf.removesuffix(WEIGHT) for rule in mapping.rules]
    parts = adapter.module.rpartition("}.")[2].split(".")
    # Try suffixes from short to long.
    for number in range(1, len(parts) + 1):
        end = ".".join(parts[-number:])
        if all(m in adapted for m in modules if f".{m}".endswith(f".{end}")):
            return [end]
    return adapter.modules


def _whole_rules(mapping: TensorMapping, lora: LoRA) -> list[TensorRule]:
    """Returns the rules of the fully trained tensors.

    Raises:
        WeightsError: peft cannot save the modules of these tensors.
    """
    tied = {ignored.same_as for ignored in mapping.ignored}
    # Group the rules by module, because peft saves a module as a whole.
    modules: dict[str, list[TensorRule]] = {}
    for rule in mapping.rules:
        modules.setdefault(rule.hf.rpartition(".")[0], []).append(rule)
    whole: list[TensorRule] = []
    for module, rules in modules.items():
        paths = {path for rule in rules for path in rule.flax}
        trained, frozen = paths & lora.whole, paths - lora.whole
        if not trained:
            continue
        if frozen:
            raise WeightsError(
                f"{min(trained)} is fully trained and {min(frozen)} is frozen, which are one "
                f"module in peft, {module}: train both (lora.also_trained), or export the merged "
                "model"
            )
        require(
            f"{module}{WEIGHT}" not in tied,
            f"{min(trained)} is fully trained and shared by two modules of transformers, which "
            "peft would separate: export the merged model",
            WeightsError,
        )
        require(
            "{i}" not in module,
            f"{module} is fully trained in every layer: export the merged model, without "
            "--form peft",
            WeightsError,
        )
        whole += rules
    return whole


def _saved_module(rule: TensorRule) -> str:
    """Returns the module that peft saves for a fully trained tensor, such as a whole classifier."""
    module = rule.hf.rpartition(".")[0]
    return "classifier" if module.startswith("classifier.") else module
