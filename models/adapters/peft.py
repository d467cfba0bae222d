"""Reads adapters in the format of the package peft.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Tensors are named after the
tensors of the model in Hugging Face's form: the adapter of `NAME.weight` is
`base_model.model.NAME.lora_A.weight` `[r, in]` and `….lora_B.weight` `[out, r]`. The adapter of an
embedding is `….lora_embedding_A` `[r, V]` and `….lora_embedding_B` `[D, r]`.

peft changes modules, not tensors: where an embedding and the output share one matrix, an adapter of
one of them leaves the other as it was. The adapted model then has two matrices.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ...data.common.errors import UserError
from ...data.common.json_text import JsonObject, read_object
from ..config import TransformerConfig
from ..hf.registry import mapping_of
from ..hf.safetensors_files import open_tensors
from ..hf.tensor_mapping import TensorMapping, TensorRule, WeightsError
from ..nn.heads import HEADS
from ..nn.typing import Params
from ..registry import family_name
from .lora import nested
from .peft_fields import (
    MERGE,
    USE_PEFT,
    check_fields,
    is_saved,
    is_targeted,
    scale_of,
    trained_tokens,
)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
KERNEL, WEIGHT = "/kernel", ".weight"
PARTS = re.compile(
    r"(.+)\.(lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]"
    r"|token_adapter\.trainable_tokens_delta)"
)
"""Names of tensors that are a part of a change."""
MODULES = (("embed_out.", "lm_head."), (".block_sparse_moe.", ".mlp."))
"""Parts of names in files, and their names in the modules of transformers 5."""
OF_ADAPTER = re.compile(r"\.(lora_|token_adapter\.)")

Kind: TypeAlias = Literal["tensor", "rows", "bias", "linear", "embedding"]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def is_peft_folder(folder: Path) -> bool:
    """Returns whether a folder has a peft adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
    """A change of one tensor of the base."""

    kind: Kind
    """A new tensor, new rows of it, or what is added: to a bias, or the product s · B A of two
    factors, to a linear map `[out, in]` or to an embedding `[V, D]`."""
    value: np.ndarray
    """The tensor, the rows, the bias, or A."""
    b: np.ndarray | None = None
    """B with the scale, of a product."""
    rows: tuple[int, ...] = ()
    of_module: bool = False
    """Whether the change affects one module only, not all modules that share the tensor."""

    def array(self) -> np.ndarray:
        """Returns the new tensor, or what is added to it, with outputs first."""
        if self.b is None:
            return self.value.astype(np.float32)
        product = self.b @ self.value.astype(np.float32)
        return product.T if self.kind == "embedding" else product

    def equals(self, other: "Edit") -> bool:
        """Returns whether another edit does the same to the same tensor."""
        same_kind = {self.kind, other.kind} in ({self.kind}, {"linear", "embedding"})
        return same_kind and self.rows == other.rows and np.array_equal(self.array(), other.array())


@dataclasses.dataclass(frozen=True)
class Update:
    """A change of one parameter."""

    sets: list[tuple[tuple[object, ...], np.ndarray]]
    """Indices and their new values."""
    added: np.ndarray | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the base's parameter is replaced entirely."""
        return any(index == () for index, _ in self.sets)

    def apply(self, x: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
        """Returns the new parameter, given the base's, if any."""
        for index, value in self.sets:
            value = jnp.asarray(value, dtype)
            x = value if x is None or index == () else x.at[index].set(value)
        assert x is not None
        return x if self.added is None else x + self.added


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """The content of a peft folder."""

    folder: Path
    fields: JsonObject
    """Its `adapter_config.json`."""
    edits: Mapping[str, Sequence[Edit]]
    """The changes of each tensor of the base, by its name."""

    @classmethod
    def read(cls, folder: Path) -> "PeftAdapter":
        """Reads a folder.

        Raises:
            UserError: It is broken, or its adapter is of a kind that is not supported.
        """
        fields = read_object(folder / CONFIG)
        check_fields(fields, folder / CONFIG)
        file = folder / WEIGHTS
        if not file.is_file():
            raise WeightsError(f"{folder} has no {WEIGHTS}: save the adapter as safetensors")
        edits: dict[str, list[Edit]] = {}
        for name, edit in _edits(fields, open_tensors(file), file):
            edits.setdefault(name, []).append(edit)
        return cls(folder, fields, edits)

    @property
    def file(self) -> Path:
        """The file with the tensors, for messages."""
        return self.folder / WEIGHTS

    def base(self, given: str | Path | None) -> str | Path:
        """Returns the model that the adapter belongs to.

        Raises:
            UserError: Neither the caller nor the folder names one.
        """
        if given is not None:
            return given
        named, revision = (self.fields.get(x) for x in ("base_model_name_or_path", "revision"))
        if not named:
            raise UserError(
                f"{self.folder} does not say what its adapter belongs to: give the base"
            )
        if revision not in (None, "main"):
            raise UserError(
                f"{self.folder / CONFIG}: revision {revision!r} of {named} is not loaded by its "
                "name: give the folder of the base"
            )
        return str(named)

    def model_config(self, base: TransformerConfig) -> TransformerConfig:
        """Returns the configuration of the adapted model.

        The head may be the adapter's, and the output may be untied from the embedding.

        Raises:
            WeightsError: The family has no model that computes the same.
        """
        config = self._with_head(base)
        if not any(map(self._is_apart, self._shared(config))):
            return config
        untied = config
        if getattr(config, "tie_output", False):
            with contextlib.suppress(UserError):
                untied = dataclasses.replace(config, tie_output=False)  # pyright: ignore[reportCallIssue]
        for names in filter(self._is_apart, self._shared(untied)):
            changed = next(name for name in names if self._own(name))
            others = ", ".join(name for name in names if name != changed)
            product = any(edit.b is not None for edit in self._own(changed))
            remedy = f"train the adapter without {changed}" if product else MERGE
            raise WeightsError(
                f"{self.file} changes {changed} and not {others}, which share one matrix in a "
                f"{family_name(config)}: {remedy}"
            )
        return untied

    def updates(
        self, base: TransformerConfig, config: TransformerConfig, shapes: Shapes
    ) -> tuple[Mapping[str, Update], Mapping[str, str]]:
        """Returns the updates of parameters, and the copies to make before them.

        Args:
            base: The configuration of the base.
            config: The configuration of the adapted model.
            shapes: The shape of each of its parameters, by path.

        Returns:
            An update for each changed path; and for each parameter that only the base shares with
            another one, the path of that other one.

        Raises:
            WeightsError: A tensor belongs to no parameter, or has another shape.
        """
        mapping = module_mapping(config)
        if mapping_of(config).to_hf_equivalent(config, _zeros(shapes))[0] != config:
            raise WeightsError(
                f"{self.folder} belongs to a model in Hugging Face's form: give the exported base"
            )
        paths = {rule.hf: rule.flax[0] for rule in mapping.rules if len(rule.flax) == 1}
        shared = self._shared(self._with_head(base))
        self._check_output_bias(shared, {rule.hf for rule in (*mapping.rules, *mapping.ignored)})
        copies = {
            paths[other]: paths[names[0]]
            for names in shared
            for other in names[1:]
            if other in paths and names[0] in paths
        }
        edits = self._apart(shared, paths.keys())
        updates: dict[str, Update] = {}
        used: set[str] = set()
        for rule in mapping.rules:
            flax = [shapes[path] for path in rule.flax]
            for index, (wanted, _) in zip(rule.indices(flax), rule.tensors(flax), strict=True):
                name = wanted if wanted in edits else mapping.find(wanted, edits.keys())
                for edit in edits.get(name or "", ()):
                    self._put(updates, edit, rule, index, name=wanted, shapes=shapes)
                    used.add(str(name))
        if unknown := sorted(edits.keys() - used):
            if self.fields.get("lora_bias") and unknown[0].endswith(".bias"):
                raise WeightsError(
                    f"{self.file}: lora_bias True gives {unknown[0]}, for which the base has no "
                    f"place: {USE_PEFT}"
                )
            raise WeightsError(
                f"{self.file} changes {unknown[0]}, which the base does not have: give the base "
                "that the adapter was trained on"
            )
        return updates, copies

    def _with_head(self, base: TransformerConfig) -> TransformerConfig:
        """Returns a base's configuration with the head of the adapter's task."""
        head = next(
            (h for h, x in HEADS.items() if x.peft_task == self.fields.get("task_type")), None
        )
        if head is None or not HEADS[head].needs_labels or head == base.head:
            return base
        probe = base.with_head(head, ("0", "1"))
        part = HEADS[head].own_params[0]
        name = next(r.hf for r in module_mapping(probe).rules if f"head/{part}/kernel" in r.flax)
        stored = [edit.value for edit in self.edits.get(name, ()) if edit.kind == "tensor"]
        if not stored:
            raise WeightsError(
                f"{self.file} lacks {name}: train the adapter with it in modules_to_save"
            )
        labels = tuple(f"LABEL_{number}" for number in range(stored[0].shape[0]))
        return base.with_head(head, labels)

    # Tensors that several modules share.

    def _shared(self, config: TransformerConfig) -> list[tuple[str, ...]]:
        """Returns groups of names that share one tensor; the first name has a parameter."""
        names: dict[str, list[str]] = {}
        mapping = module_mapping(config)
        for ignored in mapping.ignored:
            if ignored.same_as is not None:
                names.setdefault(ignored.same_as, [ignored.same_as]).append(ignored.hf)
        return list(map(tuple, names.values()))

    def _check_output_bias(self, shared: Sequence[Sequence[str]], tensors: Set[str]) -> None:
        """Rejects trained rows of an embedding that is tied to an output with a bias.

        peft then computes the output without the bias (``TrainableTokensLayer.forward``).
        """
        for first, *others in shared:
            if not _have_rows([self._own(first)]) or _have_rows(list(map(self._own, others))):
                continue
            for bias in (f"{other.removesuffix('weight')}bias" for other in others):
                if bias in tensors:
                    raise WeightsError(
                        f"{self.file}: trainable_token_indices of {first} leave {bias} out of the "
                        f"output, whose matrix is tied: {USE_PEFT}"
                    )

    def _written(self, name: str) -> str:
        """Returns the name of a tensor in the adapter, which may lack the prefix of the body."""
        return next((x for x in self.edits if name.endswith(f".{x}")), name)

    def _own(self, name: str) -> Sequence[Edit]:
        return self.edits.get(self._written(name), ())

    def _of_modules(self, names: Sequence[str]) -> list[list[Edit]]:
        """Returns the edits of each of several modules that share one tensor."""
        found = [self._own(name) for name in names]
        # Rows of the first module apply to all, unless another module has rows as well.
        common_kinds = {"tensor"} if _have_rows(found[1:]) else {"tensor", "rows"}

        def is_common(edit: Edit) -> bool:
            return edit.kind in common_kinds and not edit.of_module

        common: list[Edit] = []
        for edit in (edit for edits in found for edit in edits if is_common(edit)):
            if not any(map(edit.equals, common)):
                common.append(edit)
        if len(common) > 1:
            raise WeightsError(
                f"{self.file} has two values for {' and '.join(names)}, which are one tensor in "
                f"the base: {MERGE}"
            )
        return [[*common, *(e for e in edits if not is_common(e))] for edits in found]

    def _is_apart(self, names: Sequence[str]) -> bool:
        """Returns whether modules that share a tensor in the base no longer share it."""
        first, *others = self._of_modules(names)
        return not all(
            len(first) == len(other) and all(map(Edit.equals, first, other)) for other in others
        )

    def _apart(self, shared: Sequence[Sequence[str]], there: Set[str]) -> dict[str, Sequence[Edit]]:
        """Returns the edits of each tensor of the adapted model, by its name.

        Args:
            shared: The tensors that modules of the base share.
            there: The tensors of the adapted model.
        """
        grouped = {self._written(name) for names in shared for name in names}
        edits = {name: x for name, x in self.edits.items() if name not in grouped}
        own = {
            n: x for names in shared for n, x in zip(names, self._of_modules(names), strict=True)
        }
        return edits | {name: x for name, x in own.items() if x and name in there}

    # Parameters.

    def _put(
        self,
        updates: dict[str, Update],
        edit: Edit,
        rule: TensorRule,
        index: tuple[int, ...],
        *,
        name: str,
        shapes: Shapes,
    ) -> None:
        """Adds an edit to the updates of a tensor's parameters."""
        flax = [shapes[path][rule.num_stacked :] for path in rule.flax]
        expected = rule.layout.hf_shape(flax)
        array, is_table = edit.array(), rule.flax[0].endswith("/embedding")
        if edit.kind in ("linear", "embedding", "rows"):
            # An output is a linear map whose matrix has the form of an embedding.
            is_embedding = is_table and "output_embedding" not in rule.flax[0]
            if edit.kind != "rows" and is_embedding != (edit.kind == "embedding"):
                raise WeightsError(
                    f"{self.file} has an adapter of another kind for {name}: {MERGE}"
                )
            if edit.kind == "embedding" and name.endswith("embed_positions.weight"):
                raise WeightsError(
                    f"{self.file} adapts {name}, which peft reads at other positions than the "
                    "base: train the adapter without it"
                )
            if edit.kind == "linear" and not is_table and not rule.layout.transposed:
                array = array.T  # Conv1D
        shape = (len(edit.rows), *expected[1:]) if edit.kind == "rows" else expected
        if array.shape != shape or max(edit.rows, default=0) >= expected[0]:
            raise WeightsError(
                f"{name} in {self.file} is {list(array.shape)}, not {list(shape)}: give the base "
                "that the adapter was trained on, with as many tokens"
            )
        if edit.kind == "rows":
            update = updates.setdefault(rule.flax[0], Update([]))
            update.sets.append(((np.asarray(edit.rows),), array))
            return
        for part, path in enumerate(rule.flax):
            value = rule.layout.split(array, part, flax)
            update = updates.setdefault(path, Update([]))
            if edit.kind == "tensor":
                update.sets.append((index, value))
                continue
            if update.added is None:
                updates[path] = update = Update(update.sets, np.zeros(shapes[path], np.float32))
            assert update.added is not None
            update.added[index] += value


def _edits(
    fields: JsonObject, tensors: Mapping[str, np.ndarray], file: Path
) -> Iterator[tuple[str, Edit]]:
    """Yields names of the base's tensors and their edits, new values first."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(PREFIX)
        if bare == name or (OF_ADAPTER.search(bare) and not PARTS.fullmatch(bare)):
            raise WeightsError(f"{file} has {name}, which is not supported: {MERGE}")
        if found := PARTS.fullmatch(bare):
            parts.setdefault(found[1], {})[found[2]] = tensor
        else:
            inner = bare.replace(".base_layer.", ".")
            module = inner.rpartition(".")[0]
            of_module = inner == bare and is_saved(fields, module)
            yield inner, Edit("tensor", tensor, of_module=of_module)
    for module, own in parts.items():
        rows = own.pop("token_adapter.trainable_tokens_delta", None)
        if rows is not None:
            tokens = trained_tokens(fields, module, file)
            yield f"{module}{WEIGHT}", Edit("rows", rows, rows=tokens)
        if own:
            yield from _products(fields, module, own, file)


def _products(
    fields: JsonObject, module: str, own: dict[str, np.ndarray], file: Path
) -> Iterator[tuple[str, Edit]]:
    """Yields the product of a module's two factors, and the change of its bias."""
    kind = "embedding" if "lora_embedding_A" in own else "linear"
    names = (f"lora_{kind}_A", f"lora_{kind}_B")
    a, b = (
        own.get(x) for x in (names if kind == "embedding" else ("lora_A.weight", "lora_B.weight"))
    )
    bias = own.get("lora_B.bias")
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise WeightsError(f"the adapter of {module} in {file} is not whole: restore it")
    if len(own) != 2 + (bias is not None):
        raise WeightsError(f"{file} has two adapters of {module}: restore it")
    if not is_targeted(fields, module, file.parent / CONFIG):
        raise WeightsError(
            f"{file} has an adapter of {module}, which is not among the target_modules of "
            f"{file.parent / CONFIG}: restore them"
        )
    scale = np.float32(scale_of(fields, module, a.shape[0], file.parent / CONFIG))
    yield f"{module}{WEIGHT}", Edit(kind, a, scale * b.astype(np.float32))
    if bias is not None:
        yield f"{module}.bias", Edit("bias", scale * bias.astype(np.float32))


def _have_rows(found: Sequence[Sequence[Edit]]) -> bool:
    return any(edit.kind == "rows" for edits in found for edit in edits)


@functools.lru_cache(maxsize=8)
def module_mapping(config: TransformerConfig) -> TensorMapping:
    """Returns the tensors of a model by the names of its modules in transformers 5."""
    mapping = mapping_of(config).tensor_mapping(config)

    def renamed(name: str) -> str:
        for in_files, module in MODULES:
            name = name.replace(in_files, module)
        return name

    return dataclasses.replace(
        mapping,
        rules=tuple(dataclasses.replace(rule, hf=renamed(rule.hf)) for rule in mapping.rules),
        ignored=tuple(dataclasses.replace(x, hf=renamed(x.hf)) for x in mapping.ignored),
        legacy_names=(*mapping.legacy_names, *((module, old) for old, module in MODULES)),
    )


def _zeros(shapes: Shapes) -> Params:
    return nested({path: np.broadcast_to(np.float32(0), shape) for path, shape in shapes.items()})
