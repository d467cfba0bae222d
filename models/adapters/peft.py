"""Adapters in the form of the package peft: `adapter_config.json` and `adapter_model.safetensors`.

The names of the tensors follow from those of the model in Hugging Face's form: the adapter of the
tensor `NAME.weight` is `base_model.model.NAME.lora_A.weight` `[r, in]` and `….lora_B.weight`
`[out, r]`. Where that form has several linear maps in one, as GPT-2 its queries, keys and values,
our adapters of rank r are together one adapter of a multiple of r: the A below each other, the B in
blocks. It computes the same. Where they have one A, as those that were read from such a folder, it
stays one of rank r.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ...data.errors import UserError
from ...data.io.atomic_io import new_folder
from ...data.io.json_text import JsonObject, JsonValue, read_object
from ..config import TransformerConfig
from ..hf.registry import mapping_of
from ..hf.safetensors_files import open_tensors
from ..hf.save_weights import write_json
from ..hf.tensor_mapping import TensorMapping, TensorRule, WeightsError
from ..model import Model
from ..nn.heads import HEADS
from ..nn.typing import Params
from ..registry import create
from .lora import A, B, LinearMap, LoRA, by_path, linear_maps, nested

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
KERNEL, WEIGHT = "/kernel", ".weight"
VALUE_HEAD = "head/value/"
"""The head of values, which is for training alone and is left out."""
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin an adapter that leave the base as it is."""
UNSUPPORTED = ("use_dora", "lora_bias", "layer_replication", "target_parameters", "use_bdlora")
"""Fields that change what an adapter computes."""


def is_peft_folder(folder: Path) -> bool:
    """Returns whether a folder has an adapter of peft, and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


# Export.


@dataclasses.dataclass(frozen=True)
class _Adapter:
    """An adapter of one linear map in Hugging Face's form, or of those of all layers."""

    module: str
    """The name of the map; with `{i}`, one map for each layer."""
    a: np.ndarray
    """`[L, r, in]`."""
    b: np.ndarray
    """`[L, out, r]`."""
    is_conv1d: bool
    """Whether the map's matrix has inputs first."""

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
        folder: The folder to make, completely or not at all; it may exist if it is empty.
        model: The model.
        lora: Its adapters.
        trained: The parameters that were trained, as in `TrainState.params`.
        base: The name or the path of the base in Hugging Face's form, for those who load it.

    Raises:
        UserError: The folder holds something; or transformers has no such model, or keeps in one
            module what is in part frozen and in part trained whole.
    """
    config, flat = _as_exported(model.config, trained)
    mapping = mapping_of(config).tensor_mapping(config)
    maps = linear_maps(create(config))
    known = {path for rule in mapping.rules for path in rule.flax}
    needed = {*lora.whole, *(f"{m.path}{KERNEL}" for m in lora.maps)}
    unknown = {path for path in needed - known if not path.startswith(VALUE_HEAD)}
    if unknown:
        raise WeightsError(
            f"{min(unknown)} is trained and has no place in transformers: export the model in "
            "another form"
        )
    adapters = [
        adapter for rule in mapping.rules if (adapter := _adapter_of(rule, flat, maps)) is not None
    ]
    tensors = dict(_adapter_tensors(adapters)) | dict(_whole_tensors(mapping, lora, flat))
    fields = _peft_config(adapters, mapping, lora) | {
        "base_model_name_or_path": base,
        "task_type": HEADS[config.head].peft_task,
        "modules_to_save": _saved_modules(mapping, lora) or None,
    }

    def fill(path: Path) -> None:
        from safetensors.numpy import save_file

        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
        (path / WEIGHTS).chmod(0o644)
        write_json(path / CONFIG, fields)

    new_folder(Path(folder), fill)


def _as_exported(
    config: TransformerConfig, trained: Params
) -> tuple[TransformerConfig, Mapping[str, np.ndarray]]:
    """Returns the model that an export writes, and by path what is trained of its parameters."""
    equivalent, params = mapping_of(config).to_hf_equivalent(config, trained)
    flat, given = by_path(params), by_path(trained)
    return equivalent, {path: np.asarray(flat[path], np.float32) for path in given}


def _adapter_of(
    rule: TensorRule, flat: Mapping[str, np.ndarray], maps: Mapping[str, LinearMap]
) -> _Adapter | None:
    """Returns the adapter of a rule's tensor, if its kernels have any."""
    linear = [maps.get(path.removesuffix(KERNEL)) for path in rule.flax]
    parts = [m for m in linear if m is not None]
    adapted = {m.path for m in parts if f"{m.path}/{A}" in flat}
    if not adapted:
        return None
    widths = [math.prod(m.outputs) for m in parts]
    starts = np.cumsum([0, *widths])
    factors: list[tuple[int, np.ndarray, np.ndarray]] = []
    for part, m in enumerate(parts):
        if m.path not in adapted:
            continue
        layers, inputs = m.layers or 1, math.prod(m.inputs)
        a = flat[f"{m.path}/{A}"].reshape(layers, inputs, -1)  # [L, in, r]
        b = flat[f"{m.path}/{B}"].reshape(layers, a.shape[-1], -1)  # [L, r, out]
        factors.append((part, a.swapaxes(1, 2), b.swapaxes(1, 2)))
    first = factors[0][1]
    rank = first.shape[1]
    if len(factors) == len(parts) and all(np.array_equal(a, first) for _, a, _ in factors):
        a, b = first, np.concatenate([b for _, _, b in factors], axis=1)
    else:
        a = np.concatenate([a for _, a, _ in factors], axis=1)  # [L, n · r, in]
        b = np.zeros((len(first), starts[-1], a.shape[1]), np.float32)
        for block, (part, _, own) in enumerate(factors):
            b[:, starts[part] : starts[part + 1], block * rank : (block + 1) * rank] = own
    return _Adapter(rule.hf.removesuffix(WEIGHT), a, b, not rule.layout.transposed)


def _adapter_tensors(adapters: Sequence[_Adapter]) -> Iterator[tuple[str, np.ndarray]]:
    for adapter in adapters:
        for layer, factors in enumerate(zip(adapter.a, adapter.b, strict=True)):
            for name, x in zip(("lora_A", "lora_B"), factors, strict=True):
                module = adapter.module.format(i=layer)
                yield f"{PREFIX}{module}.{name}{WEIGHT}", np.ascontiguousarray(x)


def _peft_config(adapters: Sequence[_Adapter], mapping: TensorMapping, lora: LoRA) -> JsonObject:
    """Returns the fields of `adapter_config.json` that say where the adapters are."""
    targets = {adapter.module: _targets(adapter, adapters, mapping) for adapter in adapters}
    (usual, _), *_ = collections.Counter(adapter.rank for adapter in adapters).most_common()
    ranks = {
        name: adapter.rank
        for adapter in adapters
        for name in targets[adapter.module]
        if adapter.rank != usual
    }
    c = lora.config

    def alpha(rank: int) -> float:  # that of an equal scale
        return lora.config.scale * (math.sqrt(rank) if c.use_rslora else rank)

    names = sorted({name for some in targets.values() for name in some})
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
    """Returns the shortest ends of names that mean a module in every layer and no other module."""
    adapted = {a.module for a in adapters if a.rank == adapter.rank}
    modules = [rule.hf.removesuffix(WEIGHT) for rule in mapping.rules if rule.hf.endswith(WEIGHT)]
    parts = adapter.module.rpartition("{i}.")[2].split(".")
    for number in range(1, len(parts) + 1):
        end = ".".join(parts[-number:])
        if all(m in adapted for m in modules if f".{m}".endswith(f".{end}")):
            return [end]
    return [adapter.module.format(i=layer) for layer in range(len(adapter.a))]


def _whole_tensors(
    mapping: TensorMapping, lora: LoRA, flat: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors that are trained whole, after checking that their modules are."""
    _check_whole(mapping, lora)
    for rule in mapping.rules:
        if not lora.whole.issuperset(rule.flax):
            continue
        arrays = [flat[path] for path in rule.flax]
        shapes = [x.shape for x in arrays]
        for index, (name, _) in zip(rule.indices(shapes), rule.tensors(shapes), strict=True):
            own = [x[index] for x in arrays]
            yield PREFIX + name, np.ascontiguousarray(rule.layout.join(own))


def _saved_modules(mapping: TensorMapping, lora: LoRA) -> list[str]:
    """Returns the names of the modules that are trained whole."""
    names = set()
    for rule in mapping.rules:
        if lora.whole.issuperset(rule.flax):
            # peft itself saves the whole classifier of a sequence.
            module = rule.hf.rpartition(".")[0]
            names.add("classifier" if module.startswith("classifier.") else module)
    if stacked := [name for name in names if "{i}" in name]:
        raise WeightsError(
            f"{stacked[0]} is trained whole in every layer: export the model merged, without "
            "--form peft"
        )
    return sorted(names)


def _check_whole(mapping: TensorMapping, lora: LoRA) -> None:
    """Raises WeightsError if peft cannot save what is trained whole."""
    tied = {ignored.same_as for ignored in mapping.ignored}
    modules: dict[str, set[str]] = {}
    for rule in mapping.rules:
        modules.setdefault(rule.hf.rpartition(".")[0], set()).update(rule.flax)
    for module, paths in modules.items():
        trained, frozen = paths & lora.whole, paths - lora.whole
        if trained and frozen:
            raise WeightsError(
                f"{min(trained)} is trained whole and {min(frozen)} is frozen, which are one "
                f"module in peft, {module}: train both (lora.also_trained), or export the model "
                "merged"
            )
        if trained and f"{module}{WEIGHT}" in tied:
            raise WeightsError(
                f"{min(trained)} is trained whole and has two places in transformers, which peft "
                "would part: export the model merged"
            )


# Import.


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """The content of a folder of peft."""

    folder: Path
    fields: JsonObject
    """Its `adapter_config.json`."""
    tensors: Mapping[str, np.ndarray]
    """The tensors by name, without the prefix that they all have."""

    @classmethod
    def read(cls, folder: Path) -> "PeftAdapter":
        """Reads a folder.

        Raises:
            UserError: It is broken, or its adapter is of a kind that is not supported.
        """
        fields = read_object(folder / CONFIG)
        _check_supported(fields, folder / CONFIG)
        file = folder / WEIGHTS
        if not file.is_file():
            raise WeightsError(f"{folder} has no {WEIGHTS}: save the adapter as safetensors")
        tensors = open_tensors(file)
        names = {name: name.removeprefix(PREFIX) for name in tensors}
        odd = [
            name
            for name, bare in names.items()
            if bare == name or ("lora_" in bare and not re.search(r"\.lora_[AB]\.weight$", bare))
        ]
        if odd:
            raise WeightsError(f"{file} has {odd[0]}, which is not supported: merge it with peft")
        return cls(folder, fields, {bare: tensors[name] for name, bare in names.items()})

    def base(self, given: str | Path | None) -> str | Path:
        """Returns the model that the adapter belongs to.

        Raises:
            UserError: Neither the caller nor the folder names one.
        """
        named = self.fields.get("base_model_name_or_path")
        if given is None and not isinstance(named, str):
            raise UserError(
                f"{self.folder} does not say what its adapter belongs to: give the base"
            )
        return str(named) if given is None else given

    def model_config(self, base: TransformerConfig) -> TransformerConfig:
        """Returns the configuration of the adapted model, which may have a head of its own."""
        head = next(
            (h for h, x in HEADS.items() if x.peft_task == self.fields.get("task_type")), None
        )
        if head is None or not HEADS[head].needs_labels or head == base.head:
            return base
        probe = base.with_head(head, ("0", "1"))
        part = HEADS[head].own_params[0]
        rules = mapping_of(probe).tensor_mapping(probe).rules
        names = [rule.hf for rule in rules if f"head/{part}/kernel" in rule.flax]
        stored = self.tensors.get(names[0])
        if stored is None:
            raise WeightsError(f"{self.folder / WEIGHTS} lacks {names[0]}: save the adapter anew")
        labels = tuple(f"LABEL_{number}" for number in range(stored.shape[0]))
        return base.with_head(head, labels)

    def parameters(
        self, config: TransformerConfig, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
        """Returns what is added to kernels of the base, s · A B, and what replaces parameters.

        Args:
            config: The configuration of the adapted model.
            shapes: The shape of each of its parameters, by path.

        Raises:
            WeightsError: A tensor belongs to no parameter, or has another shape.
        """
        mapping = mapping_of(config).tensor_mapping(config)
        if mapping_of(config).to_hf_equivalent(config, _zeros(shapes))[0] != config:
            raise WeightsError(
                f"{self.folder} belongs to a model in Hugging Face's form: give the exported base"
            )
        places: dict[str, tuple[TensorRule, tuple[int, ...]]] = {}
        for rule in mapping.rules:
            flax = [shapes[path] for path in rule.flax]
            for index, (name, _) in zip(rule.indices(flax), rule.tensors(flax), strict=True):
                places[name] = places[name.removeprefix(mapping.prefix)] = rule, index
        added: dict[str, np.ndarray] = {}
        replaced: dict[str, np.ndarray] = {}
        for name, tensor in self.tensors.items():
            factor = re.fullmatch(r"(.+)\.lora_([AB])\.weight", name)
            if factor is None:
                self._put(replaced, name, tensor, places, shapes=shapes)
            elif factor[2] == "A":
                self._put(added, f"{factor[1]}{WEIGHT}", None, places, shapes=shapes)
        return added, replaced

    def _put(
        self,
        arrays: dict[str, np.ndarray],
        name: str,
        tensor: np.ndarray | None,
        places: Mapping[str, tuple[TensorRule, tuple[int, ...]]],
        *,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Writes a tensor, or the product of its adapter, to the parameters that it holds."""
        if name not in places:
            raise WeightsError(
                f"{self.folder / WEIGHTS} has {name}, which the base does not have: give another "
                "base"
            )
        rule, index = places[name]
        flax = [shapes[path][rule.num_stacked :] for path in rule.flax]
        if tensor is None:
            tensor = self._product(name.removesuffix(WEIGHT))  # [out, in]
            tensor = tensor if rule.layout.transposed else tensor.T
        if tensor.shape != rule.layout.hf_shape(flax):
            raise WeightsError(
                f"{name} in {self.folder / WEIGHTS} is {list(tensor.shape)}, not "
                f"{list(rule.layout.hf_shape(flax))}: give another base"
            )
        for part, path in enumerate(rule.flax):
            array = arrays.setdefault(path, np.zeros(shapes[path], np.float32))
            array[index][...] = rule.layout.split(tensor.astype(np.float32), part, flax)

    def _product(self, module: str) -> np.ndarray:
        """Returns s · B A of a module, `[out, in]`."""
        a, b = (self.tensors.get(f"{module}.lora_{x}{WEIGHT}") for x in "AB")
        if a is None or b is None or a.shape[0] != b.shape[-1]:
            raise WeightsError(f"the adapter of {module} in {self.folder / WEIGHTS} is not whole")
        patterns = self.fields.get("alpha_pattern")
        patterns = patterns if isinstance(patterns, dict) else {}
        found = [x for key, x in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
        alpha = found[0] if found else self.fields.get("lora_alpha", 8)
        assert isinstance(alpha, int | float)
        rank = a.shape[0]
        scale = alpha / (math.sqrt(rank) if self.fields.get("use_rslora") else rank)
        return scale * (b.astype(np.float32) @ a.astype(np.float32))


def _check_supported(fields: JsonObject, file: Path) -> None:
    """Raises WeightsError for an adapter that is more than a product of two factors."""
    if fields.get("peft_type") != "LORA":
        raise WeightsError(f"{file} is of the type {fields.get('peft_type')!r}: only LORA is read")
    unsupported = [name for name in UNSUPPORTED if fields.get(name)]
    if fields.get("bias", "none") != "none":
        unsupported.append("bias")
    if fields.get("init_lora_weights", True) not in INITIAL:
        unsupported.append("init_lora_weights")
    if unsupported:
        name = unsupported[0]
        raise WeightsError(
            f"{file}: {name} {fields[name]!r} is not supported: merge the adapter with peft "
            "(merge_and_unload), and import the model"
        )


def _zeros(shapes: Mapping[str, tuple[int, ...]]) -> Params:
    return nested({path: np.broadcast_to(np.float32(0), shape) for path, shape in shapes.items()})
