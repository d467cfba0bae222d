"""Loads the model in a folder, as a pair `(model, params)`.

A run folder contains a `config.json`, whose "model" entry defines the model, and
`checkpoints/<step>/params`, written by Orbax. A folder in the Hugging Face format contains a
different `config.json`, which names the family, and safetensors files.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..data.common.errors import UserError
from ..data.common.fields import make_record, require
from ..data.common.json_text import JsonObject
from .adapters.base import BASE, Base
from .adapters.lora import A, B, LoRA, LoRAConfig, by_path, is_adapter, make_lora, nested
from .adapters.peft import PeftAdapter, is_peft_folder
from .checksums import find_damage
from .config import Execution, TransformerConfig
from .hf.load_weights import config_of_folder, read_weights
from .hub import local_folder
from .init import parameter_shapes
from .nn.typing import Params, PyTree
from .registry import config_from_dict, create
from .run_files import (
    CHECKPOINTS,
    CONFIG_FILE,
    EMA,
    PARAMS,
    CheckpointRemoved,
    check_run,
    is_foreign,
    naming_writer,
    object_field,
    read_config,
    read_fields,
    read_step,
)


def load(
    path: str | Path,
    *,
    step: int | None = None,
    execution: Execution | None = None,
    shardings: Callable[[PyTree], PyTree] | None = None,
    base: str | Path | None = None,
    ema: bool = False,
) -> tuple[Any, Params]:
    """Loads the model of a run folder, or of a folder in the Hugging Face format.

    Low-rank adapters, from a run or a PEFT folder, are merged.

    Args:
      path: The folder that `flaxzoo train … --workdir` or `save_pretrained` of transformers
        wrote, or a name on the Hugging Face hub.
      step: The checkpoint of a run. Defaults to the newest checkpoint.
      execution: How the model is run. Defaults to float32 with scanned layers.
      shardings: Maps the tree of the parameters' shapes to the tree of their shardings
        (`train.parameter_shardings`). By default all parameters are on the first device.
      base: For a PEFT folder, the folder or hub name of the base model. Defaults to the base model
        in the configuration of the adapter.
      ema: Whether to load the moving average of the parameters, which a run with
        `optimizer.ema_decay` keeps, instead of the last parameters.

    Returns:
      The Flax module and its parameters: `model.apply({"params": params}, input_ids=…).logits`.

    Raises:
      FileNotFoundError: The folder or the checkpoint does not exist.
      UserError: The folder is broken, or its model is not supported.
    """
    folder = local_folder(path).resolve()
    if is_peft_folder(folder):
        return _load_peft(folder, base, step, execution=execution, shardings=shardings)
    require(base is None, f"{folder} is not an adapter of peft: leave base {base} out")
    model = create(model_config(folder), execution)
    targets = target_shapes(model, shardings)

    def read(step: int | None) -> Params:
        return read_params(folder, step, model.config, targets, part=EMA if ema else PARAMS)

    return model, read_step(folder, step, read)


def _load_peft(
    folder: Path,
    base: str | Path | None,
    step: int | None,
    *,
    execution: Execution | None,
    shardings: Callable[[PyTree], PyTree] | None,
) -> tuple[Any, Params]:
    """Loads a base model, and merges the PEFT adapter of a folder; see `load`."""
    adapter = PeftAdapter.read(folder)
    # The base determines the architecture; an adapter may replace its head.
    base_folder = local_folder(adapter.base(base)).resolve()
    base_config = model_config(base_folder)
    config = adapter.model_config(base_config)
    model = create(config, execution)
    targets = by_path(target_shapes(model, shardings))
    # The host merges one tensor at a time, and cannot read the shards of other processes.
    is_local = jax.process_count() == 1
    read_as = targets if is_local else by_path(target_shapes(create(config)))
    shapes = {path: x.shape for path, x in targets.items()}

    def read(step: int | None) -> Params:
        params = _read_body(base_folder, step, read_as)
        merged = adapter.merge(base_config, params, config, shapes)
        return nested(
            {
                path: jax.device_put(np.asarray(merged[path], target.dtype), target.sharding)
                for path, target in targets.items()
            }
        )

    return model, read_step(base_folder, step, read)


def target_shapes(model: Any, shardings: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    """Returns a `jax.ShapeDtypeStruct` with a sharding for each parameter of a model.

    Args:
      model: The Flax module.
      shardings: Maps the tree of shapes to the tree of shardings. By default all parameters are on
        the first device.
    """
    shapes = parameter_shapes(model)
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placement = jax.tree.map(lambda _: first_device, shapes)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        placement if shardings is None else shardings(shapes),
    )


def model_config(folder: Path) -> TransformerConfig:
    """Returns the configuration of the model in a run folder or in the Hugging Face format."""
    fields = read_fields(folder)
    if is_foreign(fields):
        return config_of_folder(folder, fields)
    described = object_field(check_run(fields, folder), "model", folder)
    with naming_writer(fields, folder):
        return config_from_dict(described)


def _check_part(folder: Path, step: int | None, part: str) -> None:
    """Raises UserError if the requested moving average is not in the checkpoint."""
    require(
        part == PARAMS or (step and (folder / CHECKPOINTS / str(step) / part).is_dir()),
        f"{folder} has no moving average of its parameters: leave --ema out, or train with "
        "--optimizer.ema-decay",
    )


def read_params(
    folder: Path,
    step: int | None,
    config: TransformerConfig,
    shapes: PyTree,
    *,
    part: str = PARAMS,
) -> Params:
    """Reads the parameters of a run folder, or of a folder in the Hugging Face format.

    Args:
      folder: The folder.
      step: The result of `chosen_step`.
      config: The configuration of the folder's model.
      shapes: A `jax.ShapeDtypeStruct` with a sharding for each parameter.
      part: The folder of the parameters in the checkpoint.

    Raises:
      UserError: The checkpoint does not contain `part`.
    """
    _check_part(folder, step, part)
    if step is None:
        return read_weights(folder, config, shapes)
    fields = read_fields(folder)
    if BASE in fields:
        return _read_merged(folder, step, config, shapes, fields=fields, part=part)
    return restore_params(folder, step, shapes, part)


def _read_merged(
    folder: Path,
    step: int,
    config: TransformerConfig,
    shapes: PyTree,
    *,
    fields: JsonObject,
    part: str,
) -> Params:
    """Reads the adapters of a run, and returns the parameters of its base with merged adapters.

    Except for rounding, the merged parameters equal the parameters of the trained model. If the run
    stored frozen parameters in bfloat16, they are rounded to bfloat16 in the result.

    Raises:
      UserError: The base is missing, or has changed.
    """
    lora, flat = adapters_of(fields, config, folder), by_path(shapes)
    base = Base.from_fields(fields, folder)
    frozen = _read_body(base.find(folder), base.step, flat)
    trained = by_path(restore_params(folder, step, _trained_shapes(lora, flat), part))
    adapted = {f"{linear.path}/kernel": linear for linear in lora.maps}
    params: Params = {}
    # Merge one parameter at a time, so that at most one parameter exists twice in memory.
    for path, target in flat.items():
        x = frozen.pop(path, None)
        x = trained[path] if path in trained else x.astype(lora.config.frozen_dtype)
        if path in adapted:
            a, b = (trained[f"{adapted[path].path}/{name}"] for name in (A, B))
            x = lora.merge_kernel(x.astype(jnp.float32), a, b, adapted[path])
        params[path] = jax.device_put(x.astype(target.dtype), target.sharding)
    return nested(params)


def _read_body(folder: Path, step: int | None, targets: Params) -> Params:
    """Reads the parameters that another model shares with the target model. The heads may differ.

    Args:
      folder: The folder of the other model.
      step: The result of `chosen_step`.
      targets: A `jax.ShapeDtypeStruct` with a sharding for each parameter, by its path.
    """
    config = model_config(folder)
    stored = by_path(target_shapes(create(config)))
    # Shard these parameters like the parameters of the target model. Restore the other parameters,
    # which are not used, to the first device.
    for path in stored.keys() & targets.keys():
        x, sharding = stored[path], targets[path].sharding
        stored[path] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    read = by_path(read_params(folder, step, config, nested(stored)))
    return {path: x for path, x in read.items() if path in targets}


@dataclasses.dataclass(frozen=True)
class AdapterRun:
    """The adapters of a run, without the base model."""

    model: Any
    """The Flax module."""
    lora: LoRA
    trained: Params
    """The adapters and all other trained parameters."""
    base: Base


def load_adapters(folder: Path, step: int | None = None, *, ema: bool = False) -> AdapterRun:
    """Loads the adapters of a run without the base model, which may be missing.

    Args:
      folder: The folder of the run.
      step: The checkpoint. Defaults to the newest checkpoint.
      ema: Whether to load the moving average of the adapters.

    Raises:
      FileNotFoundError: The folder or the checkpoint does not exist.
      UserError: The run trained no adapters, or is broken.
    """
    fields = read_config(folder)
    require(BASE in fields, f"{folder} trained no adapters (lora.rank): export the whole model")
    config = model_config(folder)
    model = create(config)
    lora = adapters_of(fields, config, folder)
    # The checkpoint has only the trained parameters, so the base is not read.
    shapes = _trained_shapes(lora, by_path(target_shapes(model)))

    def read(step: int | None) -> Params:
        assert step is not None
        part = EMA if ema else PARAMS
        _check_part(folder, step, part)
        return restore_params(folder, step, shapes, part)

    trained = read_step(folder, step, read)
    return AdapterRun(model, lora, trained, Base.from_fields(fields, folder))


def adapters_of(fields: JsonObject, config: TransformerConfig, folder: Path) -> LoRA:
    """Returns the adapters of a run, from the content of its `config.json`.

    Raises:
      UserError: The file does not describe the adapters.
    """
    stored = object_field(fields, "train", folder).get("lora")
    if not isinstance(stored, dict):
        raise UserError(f"{folder}/config.json does not describe its adapters: restore it")
    with naming_writer(fields, folder):
        return make_lora(make_record(LoRAConfig, stored, "lora."), create(config))


def _trained_shapes(lora: LoRA, targets: Params) -> Params:
    """Returns the shapes and shardings of the trained parameters in an adapter checkpoint.

    Args:
      lora: The adapters.
      targets: A `jax.ShapeDtypeStruct` with a sharding for each parameter, by its path.
    """
    # Trace the initialization to find the shapes, without creating arrays.
    zeros = jax.eval_shape(
        lambda: lora.init(
            jax.random.key(0),
            nested({p: jnp.zeros(x.shape, x.dtype) for p, x in targets.items()}),
        )[0]
    )

    def placed(path: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not is_adapter(path):
            return targets[path]
        sharding = targets[f"{path.rpartition('/')[0]}/kernel"].sharding
        # Adapters are small, so they are replicated.
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=sharding)

    flat = by_path(zeros)
    return nested({path: placed(path, x) for path, x in flat.items()})


def restore_params(folder: str | Path, step: int, shapes: PyTree, part: str = PARAMS) -> Params:
    """Reads the parameters of a checkpoint.

    Args:
      folder: A run folder.
      step: The step of the checkpoint.
      shapes: A `jax.ShapeDtypeStruct` with a sharding for each parameter.
      part: The folder of the parameters in the checkpoint.

    Raises:
      CheckpointRemoved: The checkpoint is removed during the read.
      UserError: A file differs from its checksum.
    """
    import orbax.checkpoint as ocp

    checkpoint = Path(folder).resolve() / CHECKPOINTS / str(step)
    options = ocp.options.MultiprocessingOptions()
    # Each process reads independently, because the other processes may not read at all.
    if jax.process_count() > 1:
        options = ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={jax.process_index()}
        )
    damage = None
    try:
        damage = find_damage(checkpoint, part)
        if damage is None:
            with ocp.StandardCheckpointer(multiprocessing_options=options) as checkpointer:
                # Use the handler directly. The checkpointer would warn that the folder lacks the
                # metadata of a step.
                handler: Any = ocp.StandardCheckpointHandler()
                stored = handler.metadata(checkpoint / part)
                _check_shapes(by_path(shapes), by_path(dict(stored)), checkpoint)
                return checkpointer.restore(checkpoint / part, shapes)
    # If the folder does not exist any more, training removed it during the read.
    except Exception:
        if checkpoint.is_dir():
            raise
    if not checkpoint.is_dir():
        raise CheckpointRemoved(
            f"checkpoint {step} of {folder} was removed by training while it was read: load "
            f"the folder again, or choose another step"
        )
    raise UserError(
        f"checkpoint {step} of {folder} is damaged: {damage}; restore it, or use another step"
    )


def _check_shapes(wanted: Params, stored: Params, checkpoint: Path) -> None:
    """Raises UserError, before arrays are read, if stored shapes differ from the model's shapes."""
    for path in wanted.keys() | stored.keys():
        sizes = [list(x[path].shape) if path in x else "missing" for x in (stored, wanted)]
        require(
            sizes[0] == sizes[1],
            f"{checkpoint} does not fit the model in {CONFIG_FILE}: {path} is {sizes[0]} "
            f"in the checkpoint and {sizes[1]} in the model: restore one of the two",
        )
