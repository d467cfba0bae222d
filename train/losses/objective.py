"""Training objectives, each a record of pure functions.

The loss of an objective is Σ coefficient · sum / count over its terms, where each term has a count.
Counts are computed from the whole batch, before it is split into micro-batches or over devices, so
whole, accumulated and sharded steps give the same loss. The mean of the parts' means would be
another number.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...data.common.fields import require
from ...models.nn.dropout import fold_in, row_keys
from ...models.nn.typing import Array, Float, Int, Params

Batch = Mapping[str, Array]
Terms = dict[str, Float[Array, ""]]
Predictions = dict[str, Array]
Outputs = Any
"""A model's outputs, a dataclass defined by its head."""
ApplyFn = Callable[..., Outputs]
"""`apply_fn({"params": params}, **inputs)` returns a model's outputs; with `rng`, with dropout."""


Inputs = dict[str, Array]
"""A model's keyword arguments, arrays `[B, …]`."""


FURTHER = "further"
"""The key of the further models' parameters in the tree that `joined` returns."""


@dataclasses.dataclass(frozen=True)
class FurtherModel:
    """A second model of an objective, such as a discriminator's generator or a teacher."""

    apply_fn: ApplyFn
    init: Callable[[Array], Params]
    """Makes the initial parameters from a key; a teacher returns its trained parameters."""
    trained: bool = False
    """Whether the optimizer trains it. A frozen model has neither gradient nor dropout."""
    shared: tuple[str, ...] = ()
    """The top-level names of the parameters that this model shares with the model of the run, such
    as `token_embedding`. `init` leaves these parameters out, and the gradients of both models add
    up."""
    followed: tuple[str, ...] = ()
    """The top-level names of the parameters whose updates are also added to the model of the run.
    In the model of the run, such a parameter is the sum of the parameter of this model, without its
    gradient, and a learned difference, which begins at 0 (gradient-disentangled embedding sharing,
    He et al. 2021)."""


RunModel = Callable[..., Outputs]
"""`run(**inputs)` returns a model's outputs; parameters and dropout keys are bound."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The functions that define the loss of a batch."""

    coefficients: Mapping[str, float]
    """The weight of each term in the loss."""
    inputs: Callable[[Batch], "Inputs | tuple[Inputs, ...]"]
    """The model's keyword arguments. If `inputs` returns a tuple, the model runs once for each
    entry, with different dropout, and the outputs are a tuple. An example may have several
    consecutive rows, such as the texts of a pair; dropout differs between rows."""
    counts: Callable[[Batch], Terms]
    """The number of items that each sum of `terms` is averaged over. Sums without a coefficient are
    further measures, which are reported but not trained."""
    terms: Callable[..., Terms]
    """`terms(outputs, batch)` returns the sum of each term over its items; with `reference`,
    `terms(outputs, batch, reference_outputs)`."""
    ramps: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """For terms whose weight grows: the number of steps n until the weight equals the coefficient.
    In step t, counted from 0, the weight is min(1, t / n)² times the coefficient."""
    predictions: Callable[[Outputs], Predictions] = lambda outputs: {}
    """The arrays `[B, …]` that an evaluation keeps from the outputs for a batch."""
    reference: bool = False
    """Whether `terms` also gets the outputs of frozen parameters for the batch, such as a reference
    policy. The outputs of frozen parameters are computed without dropout and without gradient."""
    keeps_initial: bool = False
    """Whether the state keeps a frozen copy of the initial parameters for other uses than `terms`:
    a rollout computes log-probabilities of this reference policy once."""
    regularizers: tuple[str, ...] = ()
    """The terms that the training loss includes but the loss of an evaluation does not."""
    models: Mapping[str, FurtherModel] = dataclasses.field(default_factory=dict)
    """Further models by name. The state keeps trained models in `further` and frozen models in
    `frozen`. Only `params`, the model of the run, is loaded and exported."""
    forward: Callable[..., Outputs] | None = None
    """`forward(run, batch)` computes the outputs: `run["model"](**inputs)` runs the model, and
    `run[name](**inputs)` runs a further model. Dropout differs between the calls. If None, the
    model alone runs on `inputs`."""
    samples: bool = False
    """Whether `forward` also gets keys `[B]`, to sample from a model: `forward(run, batch, keys)`.
    An evaluation has the same keys for every batch."""
    whole_batch: bool = False
    """Whether the terms of an example depend on other examples of the batch, as with in-batch
    negatives. Such a batch cannot run under pmap. In micro-batches the model runs twice, and its
    outputs must be floats with a row for each example; see `engine.grad_cache`."""

    def weights(self, step: Array) -> Terms:
        """Returns the weight of each term in the loss of a training step."""
        weights = {name: jnp.float32(x) for name, x in self.coefficients.items()}
        for name, number in self.ramps.items():
            weights[name] *= jnp.square(jnp.minimum(1.0, step / number))
        return weights

    @property
    def needs_initial(self) -> bool:
        """Whether the state keeps a frozen copy of the initial parameters."""
        return self.reference or self.keeps_initial

    def differences(self, params: Params) -> Params:
        """Returns the parameters; differences replace the parameters that follow another model.

        Weight decay applies to the differences.
        """
        return self._add_followed(params, -1)

    def followed(self, updates: Params) -> Params:
        """Adds the updates of the followed models to the updates of the model."""
        return self._add_followed(updates, 1)

    def _add_followed(self, tree: Params, sign: int) -> Params:
        own, further = split(tree)
        for name, model in self.models.items():
            for part in model.followed:
                other = further[name][part]
                own[part] = jax.tree.map(lambda x, y: x + sign * y, own[part], other)
        return joined(own, further or None)

    def initial_models(
        self, rng: Array, params: Params | None = None
    ) -> tuple[Params | None, Params | None]:
        """Returns the initial parameters of the trained and of the frozen further models.

        A result is None if the objective has no such models. The results become `further` of the
        state and a part of its `frozen`: `init_state(params, tx, frozen, further)`.

        Args:
            rng: the key.
            params: the initial parameters of the model of the run, if this model follows a further
              model.
        """
        trained, frozen = {}, {}
        for number, (name, model) in enumerate(self.models.items()):
            made = trained if model.trained else frozen
            made[name] = model.init(jax.random.fold_in(rng, number))
        if params is not None:
            # Both models start with equal followed parameters, so their difference is 0.
            trained = self.with_followed(trained, params)
        return trained or None, {FURTHER: frozen} if frozen else None

    def with_followed(self, further: Params, params: Params) -> Params:
        """Returns the trained further models, with the parameters that the run's model follows."""
        found = {}
        for name, own in further.items():
            followed = {part: params[part] for part in self.models[name].followed}
            found[name] = {**own, **jax.tree.map(jnp.copy, followed)}
        return found

    def outputs(
        self,
        apply_fn: ApplyFn,
        params: Params,
        batch: Batch,
        *,
        frozen: Params | None = None,
        rng: Array | None = None,
    ) -> Outputs:
        """Returns the outputs for a batch, or a tuple of outputs if `inputs` returns a tuple.

        Args:
            apply_fn: the `apply` of the model.
            params: the parameters of the model and of trained further models; see `joined`.
            batch: the batch, or a part of it.
            frozen: the frozen parameters of the state, for frozen further models.
            rng: keys `[B]` for dropout, or None.
        """
        own, trained = split(params)
        if self.forward is None:
            return self._model_outputs(apply_fn, own, batch, rng)
        # `forward` determines the order and the inputs of the models.
        run = {"model": _bound_each(apply_fn, own, rng)}
        _, fixed = split(jax.lax.stop_gradient(frozen or {}))
        for name, model in self.models.items():
            # Dropout differs between the models. The model of the run derives its keys with small
            # numbers, so use a checksum of the name.
            number = zlib.crc32(name.encode())
            keys = fold_in(rng, number) if model.trained and rng is not None else None
            chosen = trained if model.trained else fixed
            shared = {part: own[part] for part in model.shared}
            run[name] = _bound(model.apply_fn, {**chosen[name], **shared}, keys)
        if not self.samples:
            return self.forward(run, batch)
        # Without keys, as in an evaluation, every batch gets the same keys.
        number = next(iter(batch.values())).shape[0]
        given = row_keys(jax.random.key(0), number) if rng is None else rng
        return self.forward(run, batch, fold_in(given, zlib.crc32(b"samples")))

    def _model_outputs(
        self, apply_fn: ApplyFn, params: Params, batch: Batch, rng: Array | None
    ) -> Outputs:
        inputs = self.inputs(batch)
        # Each run of the model has different dropout keys.
        if isinstance(inputs, tuple):
            return tuple(
                _bound(apply_fn, params, fold_in(rng, number))(**arguments)
                for number, arguments in enumerate(inputs)
            )
        return _bound(apply_fn, params, rng)(**inputs)

    def apply(
        self,
        apply_fn: ApplyFn,
        params: Params,
        batch: Batch,
        *,
        frozen: Params | None = None,
        rng: Array | None = None,
    ) -> tuple[Outputs, Terms]:
        """Returns the model's outputs for a batch, and the terms.

        Args:
            apply_fn: the `apply` of the model.
            params: the parameters of the model.
            batch: the batch, or a part of it.
            frozen: the parameters of the reference.
            rng: keys `[B]` for dropout, or None.

        Raises:
            UserError: `terms` did not return a scalar for each coefficient.
            ValueError: the objective has a `reference`, and `frozen` is None.
        """
        outputs = self.all_outputs(apply_fn, params, batch, frozen=frozen, rng=rng)
        return outputs[0], self.sums(outputs, batch)

    def all_outputs(
        self,
        apply_fn: ApplyFn,
        params: Params,
        batch: Batch,
        *,
        frozen: Params | None = None,
        rng: Array | None = None,
    ) -> tuple[Outputs, ...]:
        """Returns the outputs for a batch, and the outputs of the reference, if any.

        `apply` describes the arguments and the exceptions.
        """
        outputs = self.outputs(apply_fn, params, batch, frozen=frozen, rng=rng)
        if not self.reference:
            return (outputs,)
        if frozen is None:
            raise ValueError(
                "the objective has a reference, but the state has no frozen parameters: give these "
                "parameters to init_state(params, tx, frozen=…)"
            )
        # The frozen tree may also contain further models.
        first = jax.lax.stop_gradient(split(frozen)[0])
        reference = self._model_outputs(apply_fn, first, batch, None)
        return outputs, jax.lax.stop_gradient(reference)

    def sums(self, outputs: tuple[Outputs, ...], batch: Batch) -> Terms:
        """Returns the terms, given the results of `all_outputs`."""
        own, *reference = outputs
        return self.checked(self.terms(own, batch, *reference), "terms")

    def checked(self, values: Any, function: str) -> Terms:
        """Returns the results of `terms` or `counts` after checking them against `coefficients`.

        Args:
            values: the results.
            function: "terms" or "counts", for messages.

        Raises:
            UserError: `values` is not a dict of scalars, or lacks a term of `coefficients`.
        """
        require(
            isinstance(values, Mapping),
            f"{function} of the objective returned {type(values).__name__}: return a dict of a "
            "scalar for each term",
        )
        # The shape of None or of a string is () as well, so check the type first.
        for name, value in values.items():
            is_number = isinstance(value, jax.Array | np.ndarray | np.generic | int | float)
            found = f"shape {np.shape(value)}" if is_number else f"type {type(value).__name__}"
            require(
                found == "shape ()",
                f"{function}[{name!r}] of the objective has the {found}: return a scalar, such as "
                "the sum over the examples",
            )
        missing = [name for name in self.coefficients if name not in values]
        require(
            not missing,
            f"{function} of the objective returned {', '.join(values) or 'nothing'} without "
            f"{missing}, which have a coefficient: return these terms, or leave them out of "
            "coefficients",
        )
        return dict(values)

    def check_counted(self, sums: Terms, counts: Terms) -> None:
        """Checks that each sum of `terms` has a count.

        Raises:
            UserError: a sum has no count.
        """
        uncounted = sorted(sums.keys() - counts.keys())
        require(
            not uncounted,
            f"terms of the objective returned {uncounted}, but counts did not: return the number "
            f"of items from counts, or leave {uncounted} out of terms",
        )


def joined(params: Params, further: Params | None) -> Params:
    """Returns one tree of the model's and the trained further models' parameters."""
    return params if further is None else {**params, FURTHER: further}


def split(params: Params) -> tuple[Params, Params]:
    """Returns the model's and the further models' parameters, the inverse of `joined`."""
    return {name: x for name, x in params.items() if name != FURTHER}, params.get(FURTHER, {})


def _bound(apply_fn: ApplyFn, params: Params, rng: Array | None) -> RunModel:
    """Binds a model's parameters and dropout keys."""

    def run(**inputs: Array) -> Outputs:
        dropout = {} if rng is None else {"rng": _keys_of_rows(rng, inputs)}
        return apply_fn({"params": params}, **dropout, **inputs)

    return run


def _bound_each(apply_fn: ApplyFn, params: Params, rng: Array | None) -> RunModel:
    """Binds parameters and keys as `_bound` does, with different keys for each run of the model."""
    runs = itertools.count()

    def run(**inputs: Array) -> Outputs:
        number = next(runs)
        # The first run derives its keys with small numbers, so use a checksum for the other runs.
        keys = fold_in(rng, zlib.crc32(f"run {number}".encode())) if number else rng
        return _bound(apply_fn, params, keys)(**inputs)

    return run


def _keys_of_rows(keys: Array, inputs: Inputs) -> Array:
    """Returns a key for each row of the inputs, given a key for each example `[B]`."""
    rows = next(iter(inputs.values())).shape[0]
    if rows == keys.shape[0]:
        return keys
    # An example has several consecutive rows, each with another key.
    of_each = [fold_in(keys, number) for number in range(rows // keys.shape[0])]
    # [B, rows of an example] to [B · rows of an example].
    return jnp.stack(of_each, axis=1).reshape(rows)


def select_inputs(*names: str) -> Callable[[Batch], Inputs]:
    """Returns a function that selects the inputs among `names` that a batch has."""
    return lambda batch: {name: batch[name] for name in names if name in batch}


def packed_weights(segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns 1 for each token of a packed sequence, 0 for padding."""
    return (segment_ids != 0).astype(jnp.float32)


def row_weights(batch: Batch) -> Float[Array, " B"]:
    """Returns 1 for each row (in multiple choice each question) that is not filler, else 0."""
    # [B, T], or [B, choices, T]; the first token of a row that is not filler is real.
    mask = batch["attention_mask"]
    return mask.reshape(mask.shape[0], -1)[:, 0].astype(jnp.float32)


ENCODER_INPUTS = select_inputs("input_ids", "attention_mask", "token_type_ids")
"""The inputs of an encoder's classifiers."""
