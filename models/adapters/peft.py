"""Reads adapters in the format of the package peft.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Tensors are named after the
tensors of the model in the Hugging Face format: the adapter of `NAME.weight` is
`base_model.model.NAME.lora_A.weight` `[r, in]` and `….lora_B.weight` `[out, r]`. The adapter of an
embedding is `….lora_embedding_A` `[r, V]` and `….lora_embedding_B` `[D, r]`.

peft changes modules, not tensors. If an embedding and the output share one matrix, an adapter of
one module does not change the other module, so the adapted model has two matrices.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from ...data.common.errors import UserError
from ...data.common.fields import require
from ...data.common.json_text import read_object
from ..config import TransformerConfig
from ..heads.specs import HEADS
from ..hf.registry import mapping_of
from ..hf.tensors.export import ExportedTensor, rule_tensors
from ..hf.tensors.layout import Shape
from ..hf.tensors.mapping import TensorMapping, TensorRule, WeightsError
from ..hf.tensors.safetensors_files import open_tensors
from ..nn.typing import Params
from ..registry import family_name
from .lora import nested
from .peft_fields import MERGE, USE_PEFT, PeftFields

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
KERNEL, WEIGHT = "/kernel", ".weight"
FACTORS = {
    "linear": ("lora_A.weight", "lora_B.weight"),
    "embedding": ("lora_embedding_A", "lora_embedding_B"),
}
"""The suffixes that follow a module's name in the tensor names of A and B."""
BIAS = "lora_B.bias"
ROWS = "token_adapter.trainable_tokens_delta"
PARTS = "|".join(map(re.escape, [*FACTORS["linear"], *FACTORS["embedding"], BIAS, ROWS]))
"""The suffixes of tensors that define an edit of a base tensor together with other tensors."""
NAME = re.compile(rf"{re.escape(PREFIX)}(?:(.+)\.({PARTS})|((?!.*\.(?:lora_|token_adapter\.)).+))")
"""The supported names: a module with one of the suffixes in `PARTS`, or a tensor of the base."""
MODULES = (("embed_out.", "lm_head."), (".block_sparse_moe.", ".mlp."))
"""Substrings of tensor names in files, and their replacements in transformers 5's module names."""

KINDS = ("tensor", "rows", "sum")
"""The kinds of edits, in the order in which they are applied."""
HEADS_OF_TASKS = {head.peft_task: name for name, head in HEADS.items() if head.needs_labels}
"""The heads that an adapter adds to its base, by the task in `adapter_config.json`."""


def is_peft_folder(folder: Path) -> bool:
    """Returns whether a folder has a peft adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
    """A change of one tensor of the base model."""

    kind: Literal["tensor", "rows", "sum"]
    """"tensor" replaces the tensor, "rows" replaces some of its rows, and "sum" is added to it."""
    value: np.ndarray
    """The new tensor, the new rows, the bias to add, or the first factor of a product to add."""
    factor: np.ndarray | None = None
    """The second factor of a product to add, `[r, in]`, or `[r, D]` for an embedding."""
    scale: float = 1.0
    """The factor that multiplies the value."""
    rows: tuple[int, ...] = ()
    of_module: bool = False
    """Whether the change affects only one of the modules that share the tensor."""

    def array(self) -> np.ndarray:
        """Returns the new tensor or rows, or the tensor to add, with the output axis first."""
        value = self.value.astype(np.float32)
        product = value if self.factor is None else value @ self.factor.astype(np.float32)
        return np.float32(self.scale) * product

    def __eq__(self, other: "Edit") -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns whether another edit makes the same change to the same tensor."""
        same_kind = (self.kind, self.rows) == (other.kind, other.rows)
        return same_kind and np.array_equal(self.array(), other.array())


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """The adapter that a peft folder contains."""

    folder: Path
    fields: PeftFields
    edits: Mapping[str, list[Edit]]
    """The edits of each base tensor, by the tensor's name, in the order of application."""

    @classmethod
    def read(cls, folder: Path) -> "PeftAdapter":
        """Reads a folder.

        Raises:
            UserError: The folder is broken, or its kind of adapter is not supported.
        """
        fields = PeftFields.read(read_object(folder / CONFIG), folder / CONFIG)
        file = folder / WEIGHTS
        problem = f"{folder} has no {WEIGHTS}: save the adapter as safetensors"
        require(file.is_file(), problem, WeightsError)
        edits: dict[str, list[Edit]] = {}
        for name, edit in _edits(fields, open_tensors(file), file):
            edits.setdefault(name, []).append(edit)
        for of_tensor in edits.values():
            of_tensor.sort(key=_order)
        return cls(folder, fields, edits)

    @property
    def file(self) -> Path:
        """The file that contains the tensors, for messages."""
        return self.folder / WEIGHTS

    def base(self, given: str | Path | None) -> str | Path:
        """Returns the name or path of the base model that the adapter belongs to.

        Raises:
            UserError: Neither the caller nor the folder names a base model.
        """
        if given is not None:
            return given
        named, revision = self.fields.base_model_name_or_path, self.fields.revision
        if not named or revision not in (None, "main"):
            raise UserError(
                f"{self.folder / CONFIG}: base_model_name_or_path {named!r}, revision "
                f"{revision!r}, does not name a model to load: give the folder of the base"
            )
        return named

    def model_config(self, base: TransformerConfig) -> TransformerConfig:
        """Returns the configuration of the adapted model.

        The adapter may have a different head, and may untie the output from the embedding.

        Raises:
            WeightsError: The family has no model that computes the same function.
        """
        config = self._with_head(base)
        edits = self._by_tensor(config)

        def is_separated(names: Sequence[str]) -> bool:
            return any(edits[name] != edits[names[0]] for name in names)

        if not any(map(is_separated, _shared_names(config))):
            return config
        # Untie the output, so that the shared tensor becomes two tensors.
        untied = config
        if getattr(config, "tie_output", False):
            with contextlib.suppress(UserError):
                untied = dataclasses.replace(config, tie_output=False)  # pyright: ignore[reportCallIssue]
        # Other modules that share a tensor cannot be untied, so reject them.
        for names in filter(is_separated, _shared_names(untied)):
            changed = next(filter(edits.get, names))
            raise WeightsError(
                f"{self.file} changes {changed} and not all of {', '.join(names)}, which share one "
                f"matrix in a {family_name(config)}: {MERGE}, or train the adapter without "
                f"{changed}"
            )
        return untied

    def _with_head(self, base: TransformerConfig) -> TransformerConfig:
        """Returns the base model's configuration with the head of the adapter's task."""
        head = HEADS_OF_TASKS.get(self.fields.task_type, base.head)
        if head == base.head:
            return base
        # The new matrix of the classifier has one row for each label.
        kernel = f"head/{HEADS[head].own_params[0]}/kernel"
        rules = module_mapping(base.with_head(head, ("0", "1"))).rules
        name = next(rule.hf for rule in rules if kernel in rule.flax)
        problem = f"{self.file} lacks {name}: train the adapter with it in modules_to_save"
        require(name in self.edits, problem, WeightsError)
        num_labels = len(self.edits[name][0].value)
        return base.with_head(head, tuple(map("LABEL_{}".format, range(num_labels))))

    def merge(
        self,
        base: TransformerConfig,
        params: Params,
        config: TransformerConfig,
        shapes: Mapping[str, Shape],
    ) -> Params:
        """Returns the parameters of the adapted model, by path.

        Args:
            base: The configuration of the base.
            params: Its parameters, by path.
            config: The configuration of the adapted model.
            shapes: The shape of each of its parameters, by path.

        Raises:
            WeightsError: A tensor belongs to no parameter, or has a wrong shape.
        """
        mapping = module_mapping(config)
        # Reject models whose parameters an export would reorder (sinusoidal positions).
        require(
            mapping_of(config).to_hf_equivalent(config, _zeros(shapes))[0] == config,
            f"{self.folder} is an adapter of a model in the Hugging Face format: give "
            f"the exported base",
            WeightsError,
        )
        # Compute the tensors of the base model. The adapted model may have separate tensors where
        # modules of the base share one.
        before = self._with_head(base)
        rules = (r for r in module_mapping(base).rules if params.keys() >= {*r.flax})
        stored = {tensor.name: tensor for rule in rules for tensor in rule_tensors(rule, params)}
        # A base without a head has no tensors of the head.
        for first, *others in _shared_names(base):
            if first in stored:
                stored |= dict.fromkeys(others, stored[first])
        edits = self._by_tensor(before)
        # Modules that still share a tensor have the same edits, so read the first module's edits.
        for ignored in mapping.ignored:
            edits.pop(ignored.hf, None)
        merged, used = dict(params), set[str]()
        for rule in mapping.rules:
            flax = [shapes[path] for path in rule.flax]
            # Keep the parameters of the base if no tensor of the rule changes.
            keys = [mapping.find(name, edits.keys()) for name, _ in rule.tensors(flax)]
            if not any(map(edits.get, keys)) and params.keys() >= {*rule.flax}:
                continue
            # Edit each tensor in the Hugging Face format, and split it into the parameters again.
            arrays = [np.zeros(shape, np.float32) for shape in flax]
            inner = [shape[rule.num_stacked :] for shape in flax]
            for index, (name, shape), key in zip(
                rule.indices(flax), rule.tensors(flax), keys, strict=True
            ):
                origin = stored.get(mapping.find(name, stored.keys()))
                tensor = self._edited(origin, edits.get(key, []), rule, name=name, shape=shape)
                for part, array in enumerate(arrays):
                    array[index] = rule.layout.split(tensor, part, inner)
            merged |= zip(rule.flax, arrays, strict=True)
            used.update(keys)
        # `lora_bias` and `bias` of peft also change modules whose base has no bias.
        unknown = min({*filter(edits.get, edits)} - used, default=None)
        require(
            unknown is None,
            f"{self.file} changes {unknown}, which the base does not have: give the base "
            "that the adapter was trained on, or use the adapter with peft",
            WeightsError,
        )
        return merged

    def _edited(
        self,
        origin: ExportedTensor | None,
        edits: Sequence[Edit],
        rule: TensorRule,
        *,
        name: str,
        shape: Shape,
    ) -> np.ndarray:
        """Applies an adapter's edits to a tensor of the base, or to None if the base lacks it."""
        require(
            origin is not None or (edits and edits[0].kind == "tensor"),
            f"neither {self.folder} nor its base has {name}: give the base that the adapter "
            "was trained on",
            WeightsError,
        )
        tensor = np.zeros(shape, np.float32) if origin is None else origin.make()
        tensor = np.array(tensor, np.float32)
        # An output projection is a linear map whose matrix has the shape of an embedding.
        is_conv1d = not rule.layout.transposed and not rule.flax[0].endswith("/embedding")
        for edit in edits:
            change, rows = edit.array(), [*edit.rows] or slice(None)
            if edit.kind == "sum" and is_conv1d:
                change = change.T
            # Without this check, numpy would broadcast a change with a wrong shape.
            expected = (len(edit.rows) or shape[0], *shape[1:])
            require(
                change.shape == expected and max(edit.rows, default=0) < shape[0],
                f"{name} in {self.file} is {list(change.shape)}, not {list(expected)}: give "
                "the base that the adapter was trained on, with as many tokens",
                WeightsError,
            )
            # New values replace the tensor or some of its rows; products are added to it.
            tensor[rows] = change + tensor if edit.kind == "sum" else change
        return tensor

    def _by_tensor(self, config: TransformerConfig) -> dict[str, list[Edit]]:
        """Returns the edits of each tensor, where modules that share a tensor have separate edits.

        Raises:
            WeightsError: Two modules have different values for the tensor that they share, or the
                adapter trains rows of an embedding that is tied to an output with a bias. peft
                computes such an output without the bias (``TrainableTokensLayer.forward``).
        """
        edits = dict(self.edits)
        mapping = module_mapping(config)
        tensors = {x.hf for x in (*mapping.rules, *mapping.ignored)}
        for group in _shared_names(config):
            # A name in the adapter may omit the prefix of the model's body.
            keys = [
                next((key for key in self.edits if f".{name}".endswith(f".{key}")), name)
                for name in group
            ]
            first, *others = of_modules = [edits.pop(key, []) for key in keys]
            # The same new tensor may be stored under the name of each module.
            all_edits = itertools.chain(*of_modules)
            values = [x for x in all_edits if x.kind == "tensor" and not x.of_module]
            require(
                all(map(values[:1].__contains__, values)),
                f"{self.file} has two values for {' and '.join(group)}, which are one tensor in "
                f"the base: {MERGE}",
                WeightsError,
            )
            # New rows of the first module apply to all modules, unless a different module also has
            # new rows.
            rows = [] if any(map(_has_rows, others)) else list(filter(_is_rows, first))
            biases = {f"{name.removesuffix('weight')}bias" for name in group[1:]} & tensors
            require(
                not rows or not biases,
                f"{self.file}: trainable_token_indices of {group[0]} leave {', '.join(biases)} out "
                f"of the output, whose matrix is tied: {USE_PEFT}",
                WeightsError,
            )
            common = [*values[:1], *rows]
            for name, x in zip(group, of_modules, strict=True):
                edits[name] = sorted([*common, *(e for e in x if e not in common)], key=_order)
        return edits


def _edits(
    fields: PeftFields, tensors: Mapping[str, np.ndarray], file: Path
) -> Iterator[tuple[str, Edit]]:
    """Yields the names of the base's tensors and their edits."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise WeightsError(f"{file} has {name}, which is not supported: {MERGE}")
        module, part, whole = match.groups()
        if part is not None:
            parts.setdefault(module, {})[part] = tensor
            continue
        # A tensor without factors replaces a tensor of the base: it is a copy of a module, or the
        # base's tensor in a wrapper.
        inner = whole.replace(".base_layer.", ".")
        saved = inner == whole and fields.is_saved(inner.rpartition(".")[0])
        yield inner, Edit("tensor", tensor, of_module=saved)
    for module, of_module in parts.items():
        if (rows := of_module.pop(ROWS, None)) is not None:
            tokens = fields.trained_tokens(module, len(rows))
            yield f"{module}{WEIGHT}", Edit("rows", rows, rows=tokens)
        if of_module:
            yield from _products(fields, module, of_module, file)


def _products(
    fields: PeftFields, module: str, parts: dict[str, np.ndarray], file: Path
) -> Iterator[tuple[str, Edit]]:
    """Yields the edits of a module: the product of its two factors, and the change of its bias."""
    bias = parts.pop(BIAS, None)
    kind = "embedding" if parts.keys() & {*FACTORS["embedding"]} else "linear"
    a, b = (parts.get(name, np.zeros(0)) for name in FACTORS[kind])
    require(
        parts.keys() == {*FACTORS[kind]} and a.shape[:1] == b.shape[1:],
        f"the adapter of {module} in {file} is not complete: restore it",
        WeightsError,
    )
    require(
        kind == "linear" or not module.endswith("embed_positions"),
        f"{file} adapts {module}, which peft reads at other positions than the base: train the "
        "adapter without it",
        WeightsError,
    )
    scale = fields.scale(module, a.shape[0])
    # Linear maps are [out, in] = B A, and embeddings are [V, D], the transpose of B A.
    factors = (b, a) if kind == "linear" else (a.T, b.T)
    yield f"{module}{WEIGHT}", Edit("sum", *factors, scale)
    if bias is not None:
        yield f"{module}.bias", Edit("sum", bias, scale=scale)


def _order(edit: Edit) -> int:
    return KINDS.index(edit.kind)


def _is_rows(edit: Edit) -> bool:
    return edit.kind == "rows"


def _has_rows(edits: Sequence[Edit]) -> bool:
    return any(map(_is_rows, edits))


def _shared_names(config: TransformerConfig) -> list[tuple[str, ...]]:
    """Returns groups of names that share one tensor; files store it under the first name."""
    names: dict[str, list[str]] = {}
    for ignored in module_mapping(config).ignored:
        if ignored.same_as is not None:
            names.setdefault(ignored.same_as, [ignored.same_as]).append(ignored.hf)
    return [*map(tuple, names.values())]


@functools.lru_cache(maxsize=8)
def module_mapping(config: TransformerConfig) -> TensorMapping:
    """Returns the tensor mapping of a model, with the names of its modules in transformers 5."""
    record = mapping_of(config)
    mapping = (record.module_mapping or record.tensor_mapping)(config)

    def renamed(name: str) -> str:
        for in_files, module in MODULES:
            name = name.replace(in_files, module)
        return name

    return dataclasses.replace(
        mapping,
        rules=tuple(dataclasses.replace(rule, hf=renamed(rule.hf)) for rule in mapping.rules),
        ignored=tuple(dataclasses.replace(x, hf=renamed(x.hf)) for x in mapping.ignored),
        # Tensors are also found under the names that files use.
        legacy_names=(*mapping.legacy_names, *((module, old) for old, module in MODULES)),
    )


def _zeros(shapes: Mapping[str, Shape]) -> Params:
    return nested({path: np.broadcast_to(np.float32(0), shape) for path, shape in shapes.items()})
