"""The fields of `adapter_config.json` that determine what an adapter computes.

The rank, the adapted modules and their layers are taken from the names and shapes of the tensors.
Other fields that change the result, and unknown fields, are rejected by name, unless their value
has no effect.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from ...data.common.errors import UserError
from ...data.common.fields import Checked, field_names, make_record, require
from ...data.common.json_text import JsonObject
from ..hf.tensors.mapping import WeightsError
from .lora import scale_divisor

MERGE = "merge the adapter with peft (merge_and_unload), and import the model"
USE_PEFT = "no merged model computes the same function: use the adapter with peft"
CONVERT = (
    "save the adapter with path_initial_model_for_weight_conversion of peft's save_pretrained, "
    "which converts it to an ordinary adapter"
)
REMEDIES = {
    "alora_invocation_tokens": USE_PEFT,
    "arrow_config": USE_PEFT,
    "monteclora_config": USE_PEFT,
    "layer_replication": USE_PEFT,
    "corda": CONVERT,
}
"""The remedy for each unsupported field and each unsupported value of `init_lora_weights`. All
others have the remedy `MERGE`.
"""
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""The values of `init_lora_weights` that leave the base unchanged."""
UNUSED = frozenset(
    """
    r target_modules exclude_modules layers_to_transform layers_pattern rank_pattern lora_bias
    ensure_weight_tying fan_in_fan_out bias lora_dropout init_lora_weights
    auto_mapping peft_version inference_mode megatron_core loftq_config eva_config corda_config
    lora_ga_config velora_config qalora_group_size runtime_config
    """.split()
)
"""Ignored fields: the tensors show their effect, they only affect training, or they have an effect
only together with another field."""
MAX_REPEATS = 5
"""Maximum number of repetitions in a regular expression, which limits the time of a match."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftFields(Checked):
    """The supported fields of `adapter_config.json`."""

    peft_type: Literal["LORA"]
    lora_alpha: int | float = 8
    use_rslora: bool = False
    alpha_pattern: Mapping[str, int | float] | None = None
    """The value of `lora_alpha` for some modules, by regular expressions that match the ends of
    their names."""
    modules_to_save: tuple[str, ...] | None = None
    """Suffixes of the names of modules that the adapter replaces with a copy."""
    trainable_token_indices: tuple[int, ...] | Mapping[str, Sequence[int]] | None = None
    """The trained rows of the embedding, or the trained rows of several modules by module name."""
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None

    @classmethod
    def read(cls, stored: JsonObject, file: Path) -> "PeftFields":
        """Returns the supported fields, given the content of a file.

        Raises:
            WeightsError: A field is not supported, or has a wrong type.
        """
        known = field_names(cls)
        # An unknown field with a false or empty value has no effect.
        for name, value in stored.items():
            problem = f"{file}: {name} {value!r} is not supported: {REMEDIES.get(name, MERGE)}"
            require(not value or name in known | UNUSED, problem, WeightsError)
        initial = stored.get("init_lora_weights", True)
        remedy = REMEDIES.get(str(initial), MERGE)
        problem = f"{file}: init_lora_weights {initial!r} is not supported: {remedy}"
        require(initial in INITIAL, problem, WeightsError)
        try:
            fields = make_record(cls, {n: x for n, x in stored.items() if n in known})
            for pattern in fields.alpha_pattern or ():
                _check_pattern(pattern)
        except UserError as error:
            raise WeightsError(f"{file}: {error}") from None
        return fields

    def scale(self, module: str, rank: int) -> float:
        """Returns the factor that multiplies the product A B of a module's adapter."""
        # As in peft, the first pattern that matches the end of the name is used.
        patterns = (self.alpha_pattern or {}).items()
        alphas = (x for key, x in patterns if re.fullmatch(rf"(.*\.)?({key})", module))
        return next(alphas, self.lora_alpha) / scale_divisor(rank, self.use_rslora)

    def trained_tokens(self, module: str, num_rows: int) -> tuple[int, ...]:
        """Returns the tokens whose rows in a module are trained.

        Raises:
            WeightsError: The number of tokens in the field differs from the module's number of
              trained rows.
        """
        stored = self.trainable_token_indices or ()
        if isinstance(stored, Mapping):
            stored = next((x for name, x in stored.items() if module.endswith(name)), ())
        require(
            len(stored) == num_rows and min(stored, default=0) >= 0,
            f"trainable_token_indices must name the {num_rows} trained tokens of {module}, "
            f"got {stored!r}: restore adapter_config.json",
            WeightsError,
        )
        return tuple(stored)

    def is_saved(self, module: str) -> bool:
        """Returns whether the adapter replaces a module of the base with a copy."""
        return any(map(module.endswith, self.modules_to_save or ()))


def _check_pattern(pattern: str) -> None:
    """Checks that a regular expression is valid, and that a match cannot take long."""
    # A repeated group can take time exponential in the length of a name.
    require(
        not re.search(r"\)[*+{]", pattern) and len(re.findall("[*+{]", pattern)) <= MAX_REPEATS,
        f"alpha_pattern {pattern!r} repeats too often: name the modules, or use up to "
        f"{MAX_REPEATS} repetitions, and do not repeat a group",
    )
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"alpha_pattern {pattern!r} is not valid ({error})") from None
