"""Reads adapters in the format of the package peft.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Tensors are named after the
tensors of the model in the Hugging Face format: the adapter of `NAME.weight` is
`base_model.model.NAME.lora_A.weight` `[r, in]` and `….lora_B.weight` `[out, r]`. The adapter of an
embedding is `….lora_embedding_A` `[r, V]` and `….lora_embedding_B` `[D, r]`.

peft changes modules, not tensors: where an embedding and the output share one matrix, an adapter of
one module does not change the other module. A model with such an adapter has two matrices.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from ...data.common.errors import UserError
from ...data.common.fields import require
from ...data.common.json_text import read_object
from ..config import TransformerConfig
from ..heads.specs import HEADS
from ..hf.registry import mapping_of
from ..hf.tensors.export import rule_tensors
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
    "linear": {"lora_A.weight", "lora_B.weight"},
    "embedding": {"lora_embedding_A", "lora_embedding_B"},
}
"""The names of A and B after a module's name."""
BIAS = "lora_B.bias"
ROWS = "token_adapter.trainable_tokens_delta"
PARTS = re.compile(
    rf"(.+)\.({'|'.join(map(re.escape, [*FACTORS['linear'], *FACTORS['embedding'], BIAS, ROWS]))})"
)
"""The names of tensors that, together with others, define an edit of the base's tensors."""
OF_ADAPTER = re.compile(r"\.(lora_|token_adapter\.)")
MODULES = (("embed_out.", "lm_head."), (".block_sparse_moe.", ".mlp."))
"""Substrings of tensor names in files, and what replaces them in the modules of transformers 5."""

Kind: TypeAlias = Literal["tensor", "rows", "bias", "linear", "embedding"]


def is_peft_folder(folder: Path) -> bool:
    """Returns whether a folder has a peft adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
    """A change of one tensor of the base model."""

    kind: Kind
    """The kind of change. "tensor" is a new tensor, "rows" are new rows of it, and "bias" is added
    to a bias. "linear" and "embedding" are products s · B A of two factors, which are added to a
    linear map `[out, in]` or to an embedding `[V, D]`.
    """
    value: np.ndarray
    """The new tensor, the new rows, the bias, or the factor A."""
    b: np.ndarray | None = None
    """For a product, B multiplied by the scale; otherwise None."""
    rows: tuple[int, ...] = ()
    of_module: bool = False
    """Whether the change affects only one of the modules that share the tensor."""

    def array(self) -> np.ndarray:
        """Returns the new tensor or rows, or the tensor to add, with the axis of outputs first."""
        value = self.value.astype(np.float32)
        if self.b is None:
            return value
        product = self.b @ value
        return product.T if self.kind == "embedding" else product

    def equals(self, other: "Edit") -> bool:
        """Returns whether another edit makes the same change to the same tensor."""
        same_kind = self.kind == other.kind or {self.kind, other.kind} == {*FACTORS}
        return same_kind and self.rows == other.rows and np.array_equal(self.array(), other.array())


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """The adapter that a peft folder contains."""

    folder: Path
    fields: PeftFields
    edits: Mapping[str, Sequence[Edit]]
    """The changes of each tensor of the base model, by the tensor's name."""

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

        The adapter may have another head, and may untie the output from the embedding.

        Raises:
            WeightsError: The family has no model that computes the same function.
        """
        config = self._with_head(base)
        if not any(map(self._separates, _shared_names(config))):
            return config
        # Untie the output, so that the shared tensor becomes two tensors.
        untied = config
        if getattr(config, "tie_output", False):
            with contextlib.suppress(UserError):
                untied = dataclasses.replace(config, tie_output=False)  # pyright: ignore[reportCallIssue]
        # Other modules that share a tensor cannot be untied, so reject them.
        for names in filter(self._separates, _shared_names(untied)):
            changed = next(filter(self._own, names))
            others = ", ".join(name for name in names if name != changed)
            product = any(edit.b is not None for edit in self._own(changed))
            remedy = f"train the adapter without {changed}" if product else MERGE
            raise WeightsError(
                f"{self.file} changes {changed} and not {others}, which share one matrix in a "
                f"{family_name(config)}: {remedy}"
            )
        return untied

    def _with_head(self, base: TransformerConfig) -> TransformerConfig:
        """Returns the base model's configuration with the head of the adapter's task."""
        # A task with labels gives the model a new head; other tasks keep the base's head.
        heads = (h for h, x in HEADS.items() if x.peft_task == self.fields.task_type)
        head = next(heads, base.head)
        if not HEADS[head].needs_labels or head == base.head:
            return base
        # The new matrix of the classifier has one row for each label.
        probe = base.with_head(head, ("0", "1"))
        part = HEADS[head].own_params[0]
        name = next(r.hf for r in module_mapping(probe).rules if f"head/{part}/kernel" in r.flax)
        stored = [edit.value for edit in self.edits.get(name, ()) if edit.kind == "tensor"]
        problem = f"{self.file} lacks {name}: train the adapter with it in modules_to_save"
        require(stored, problem, WeightsError)
        labels = tuple(f"LABEL_{number}" for number in range(stored[0].shape[0]))
        return base.with_head(head, labels)

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
            WeightsError: A tensor belongs to no parameter, or has another shape.
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
        shared = _shared_names(self._with_head(base))
        origins = {name: names[0] for names in shared for name in names}
        rules = (r for r in module_mapping(base).rules if params.keys() >= {*r.flax})
        stored = {tensor.name: tensor for rule in rules for tensor in rule_tensors(rule, params)}
        edits = self._separated(shared, mapping)
        merged, used = dict(params), set[str]()
        for rule in mapping.rules:
            flax = [shapes[path] for path in rule.flax]
            # Keep the parameters of the base if no tensor of the rule changes.
            found = [mapping.find(name, edits.keys()) for name, _ in rule.tensors(flax)]
            if not any(found) and params.keys() >= {*rule.flax}:
                continue
            problem = f"{self.file} changes {rule.hf}, which some layers lack: {MERGE}"
            require(rule.layers is None, problem, WeightsError)
            # Edit each tensor in the Hugging Face format, and split it into the parameters again.
            tensors: list[np.ndarray] = []
            for (name, shape), key in zip(rule.tensors(flax), found, strict=True):
                origin = mapping.find(name, stored.keys()) or origins.get(name, "")
                tensor = stored[origin].make() if origin in stored else None
                own = edits.get(key or "", ())
                tensors.append(self._edited(tensor, own, rule, name=name, shape=shape))
            inner = [shape[rule.num_stacked :] for shape in flax]
            for part, (path, shape) in enumerate(zip(rule.flax, flax, strict=True)):
                parts = [rule.layout.split(tensor, part, inner) for tensor in tensors]
                merged[path] = np.stack(parts).reshape(shape)
            used.update(filter(None, found))
        if unknown := sorted(edits.keys() - used):
            # `lora_bias` and `bias` of peft also change modules whose base has no bias.
            remedy = "give the base that the adapter was trained on"
            raise WeightsError(
                f"{self.file} changes {unknown[0]}, which the base does not have: "
                f"{USE_PEFT if unknown[0].endswith('.bias') else remedy}"
            )
        return merged

    def _edited(
        self,
        tensor: np.ndarray | None,
        edits: Sequence[Edit],
        rule: TensorRule,
        *,
        name: str,
        shape: Shape,
    ) -> np.ndarray:
        """Applies an adapter's edits to a tensor of the base; None if the base lacks the tensor."""
        require(
            tensor is not None or _has("tensor", edits),
            f"neither {self.folder} nor its base has {name}: give the base that the adapter "
            "was trained on",
            WeightsError,
        )
        # An output projection is a linear map whose matrix has the shape of an embedding.
        is_conv1d = not rule.layout.transposed and not rule.flax[0].endswith("/embedding")
        for edit in edits:
            change, expected = edit.array(), shape
            require(
                edit.kind != "embedding" or not name.endswith("embed_positions.weight"),
                f"{self.file} adapts {name}, which peft reads at other positions than the "
                "base: train the adapter without it",
                WeightsError,
            )
            if edit.kind == "linear" and is_conv1d:
                change = change.T
            if edit.kind == "rows":
                expected = (len(edit.rows), *shape[1:])
            # Without this check, numpy would broadcast a change with a wrong shape.
            require(
                change.shape == expected and max(edit.rows, default=0) < shape[0],
                f"{name} in {self.file} is {list(change.shape)}, not {list(expected)}: give "
                "the base that the adapter was trained on, with as many tokens",
                WeightsError,
            )
            # New values replace the tensor or some of its rows; products are added to it.
            if tensor is None or edit.kind == "tensor":
                tensor = change
            elif edit.kind == "rows":
                tensor = tensor.copy()
                tensor[[*edit.rows]] = change
            else:
                tensor = tensor + change
        assert tensor is not None
        return tensor

    # The following methods handle tensors that several modules share.

    def _written(self, name: str) -> str:
        """Returns a tensor's name in the adapter, which may omit the prefix of the model's body."""
        return next((x for x in self.edits if name.endswith(f".{x}")), name)

    def _own(self, name: str) -> Sequence[Edit]:
        return self.edits.get(self._written(name), ())

    def _by_module(self, names: Sequence[str]) -> list[list[Edit]]:
        """Returns the edits that apply to each of several modules that share one tensor."""
        found = list(map(self._own, names))
        # New rows of the first module apply to all modules, unless another module has new rows as
        # well.
        common_kinds = {"tensor"} if any(map(_has_rows, found[1:])) else {"tensor", "rows"}

        def is_common(edit: Edit) -> bool:
            return edit.kind in common_kinds and not edit.of_module

        # The same change may be stored under the name of each module.
        common: list[Edit] = []
        for edit in filter(is_common, (edit for edits in found for edit in edits)):
            if not any(map(edit.equals, common)):
                common.append(edit)
        # Apply new values first, because they would overwrite the other changes.
        common.sort(key=lambda edit: edit.kind != "tensor")
        require(
            sum(edit.kind == "tensor" for edit in common) <= 1,
            f"{self.file} has two values for {' and '.join(names)}, which are one tensor in the "
            f"base: {MERGE}",
            WeightsError,
        )
        return [[*common, *itertools.filterfalse(is_common, edits)] for edits in found]

    def _separates(self, names: Sequence[str]) -> bool:
        """Returns whether modules that share a tensor in the base no longer share it."""
        first, *others = self._by_module(names)
        return not all(
            len(first) == len(other) and all(map(Edit.equals, first, other)) for other in others
        )

    def _separated(
        self, shared: Sequence[Sequence[str]], mapping: TensorMapping
    ) -> dict[str, Sequence[Edit]]:
        """Returns the edits of each tensor of the adapted model, by the tensor's name.

        Args:
            shared: The tensors that modules of the base share.
            mapping: The tensors of the adapted model.

        Raises:
            WeightsError: The adapter trains rows of an embedding that is tied to an output with a
                bias. peft computes such an output without the bias
                (``TrainableTokensLayer.forward``).
        """
        names = {rule.hf for rule in mapping.rules}
        tied = names | {ignored.hf for ignored in mapping.ignored}
        grouped = {self._written(name) for group in shared for name in group}
        edits = {name: x for name, x in self.edits.items() if name not in grouped}
        # Combine the edits of all modules that share a tensor in the base.
        for group in shared:
            by_name = zip(group, self._by_module(group), strict=True)
            edits |= {name: own for name, own in by_name if own and name in names}
            first, *others = map(self._own, group)
            biases = {f"{other.removesuffix('weight')}bias" for other in group[1:]} & tied
            if biases and _has_rows(first) and not any(map(_has_rows, others)):
                raise WeightsError(
                    f"{self.file}: trainable_token_indices of {group[0]} leave {min(biases)} out "
                    f"of the output, whose matrix is tied: {USE_PEFT}"
                )
        return edits


def _edits(
    fields: PeftFields, tensors: Mapping[str, np.ndarray], file: Path
) -> Iterator[tuple[str, Edit]]:
    """Yields the names of the base's tensors and their edits; new values precede other edits."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(PREFIX)
        part = PARTS.fullmatch(bare)
        require(
            bare != name and (part is not None or not OF_ADAPTER.search(bare)),
            f"{file} has {name}, which is not supported: {MERGE}",
            WeightsError,
        )
        if part is not None:
            parts.setdefault(part[1], {})[part[2]] = tensor
            continue
        # A tensor without factors replaces a tensor of the base: it is a copy of a module, or the
        # base's tensor in a wrapper.
        inner = bare.replace(".base_layer.", ".")
        saved = inner == bare and fields.is_saved(inner.rpartition(".")[0])
        yield inner, Edit("tensor", tensor, of_module=saved)
    for module, own in parts.items():
        # Yield new rows before products, which are added to them.
        if (rows := own.pop(ROWS, None)) is not None:
            tokens = fields.trained_tokens(module, len(rows))
            yield f"{module}{WEIGHT}", Edit("rows", rows, rows=tokens)
        if own:
            yield from _products(fields, module, own, file)


def _products(
    fields: PeftFields, module: str, own: dict[str, np.ndarray], file: Path
) -> Iterator[tuple[str, Edit]]:
    """Yields the edits of a module: the product of its two factors, and the change of its bias."""
    bias = own.pop(BIAS, None)
    kind = "embedding" if FACTORS["embedding"] & own.keys() else "linear"
    # Sorting by name puts A before B.
    a, b, *_ = (*(x for _, x in sorted(own.items())), None, None)
    if own.keys() != FACTORS[kind] or a is None or b is None or a.shape[:1] != b.shape[1:]:
        raise WeightsError(f"the adapter of {module} in {file} is not complete: restore it")
    scale = np.float32(fields.scale(module, a.shape[0]))
    yield f"{module}{WEIGHT}", Edit(kind, a, scale * b.astype(np.float32))
    if bias is not None:
        yield f"{module}.bias", Edit("bias", scale * bias.astype(np.float32))


def _has(kind: Kind, edits: Sequence[Edit]) -> bool:
    return any(edit.kind == kind for edit in edits)


_has_rows = functools.partial(_has, "rows")


def _shared_names(config: TransformerConfig) -> list[tuple[str, ...]]:
    """Returns groups of names of one shared tensor; a parameter is stored under the first name."""
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
