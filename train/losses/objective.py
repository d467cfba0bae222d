"""Training objectives, each a record of pure functions.

The loss of an objective is Σ coefficient · sum / count over its terms, where each term has a count.
Counts are computed from the whole batch, before it is split into micro-batches or over devices. The
loss therefore does not depend on the number of micro-batches or devices. If the loss were the mean
of the micro-batches' means, it would depend on this number.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...data.common.errors import UserError
from ...data.common.fields import require
from ...models.nn.dropout import fold_in, row_keys
from ...models.nn.typing import Array, Float, Int, Params

Batch = Mapping[str, Array]
Terms = dict[str, Float[Array, ""]]
Predictions = dict[str, Array]
Outputs = Any
"""The outputs of a model, in a dataclass that the model's head defines."""
ApplyFn = Callable[..., Outputs]
"""`apply_fn({"params": params}, **inputs)` returns a model's outputs; `rng` enables dropout."""


Inputs = dict[str, Array]
"""A model's keyword arguments, arrays `[B, …]`."""


AUXILIARY = "auxiliary"
"""The key of the auxiliary models' parameters in the tree that `joined` returns."""


@jax.tree_util.register_pytree_node_class
class NamedArrays(dict[str, Array]):
    """The arrays of a batch, which raise a UserError instead of a KeyError for a missing array."""

    def __missing__(self, name: str) -> Array:
        raise UserError(
            f"the batch has no array {name!r}, which the objective reads; it has "
            f"{', '.join(self) or 'none'}: add the arrays that docs/explain/batches.md lists for "
            "this kind of data"
        )

    def tree_flatten(self) -> tuple[tuple[Array, ...], tuple[str, ...]]:
        """Returns the arrays and their names; jax transforms a batch as it transforms a dict."""
        names = tuple(sorted(self))
        return tuple(self[name] for name in names), names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], arrays: Iterable[Array]) -> "NamedArrays":
        """Returns a batch from the results of `tree_flatten`."""
        return cls(zip(names, arrays, strict=True))


@dataclasses.dataclass(frozen=True)
class AuxiliaryModel:
    """A model that an objective runs in addition to the run's model.

    Examples are a teacher, and the generator whose tokens a discriminator learns to detect.
    """

    apply_fn: ApplyFn
    init: Callable[[Array], Params]
    """Makes the initial parameters from a key. For a teacher, it returns the trained parameters."""
    trained: bool = False
    """Whether the optimizer trains this model. A frozen model has no gradient and no dropout."""
    shared: tuple[str, ...] = ()
    """The top-level names of the parameters that this model shares with the model of the run, such
    as `token_embedding`. `init` leaves these parameters out, and the gradients of both models add
    up."""
    followed: tuple[str, ...] = ()
    """The top-level names of the parameters whose updates are also added to the model of the run.
    In the model of the run, such a parameter is the sum of two parts: the parameter of this model,
    which gets no gradient from the run's model, and a learned difference, which is initially 0
    (gradient-disentangled embedding sharing, He et al. 2021)."""


RunModel = Callable[..., Outputs]
"""`run(**inputs)` returns a model's outputs, for fixed parameters and dropout keys."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The functions that define the loss of a batch."""

    coefficients: Mapping[str, float]
    """The weight of each trained term in the loss."""
    inputs: Callable[[Batch], "Inputs | tuple[Inputs, ...]"]
    """Returns the model's keyword arguments for a batch. If it returns a tuple, the model runs once
    for each entry with different dropout each time, and the outputs are a tuple. An example may
    have several consecutive rows, such as the texts of a pair; dropout differs between rows."""
    counts: Callable[[Batch], Terms]
    """Returns the number of items that each sum of `terms` is averaged over. Sums without a
    coefficient are metrics, which are reported but not trained."""
    terms: Callable[..., Terms]
    """`terms(outputs, batch)` returns the sum of each term over its items; if `reference` is true,
    it is called as `terms(outputs, batch, reference_outputs)`."""
    ramps: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """For each term whose weight grows during training: the number of steps n until the weight
    equals the coefficient. In step t, counted from 0, the weight is min(1, t / n)² times the
    coefficient."""
    predictions: Callable[[Outputs], Predictions] = lambda outputs: {}
    """Returns the arrays `[B, …]` that an evaluation collects from the outputs for a batch."""
    reference: bool = False
    """Whether `terms` also gets the outputs of the model with frozen parameters, such as a
    reference policy. The outputs of the frozen model have no dropout and no gradient."""
    keeps_initial: bool = False
    """Whether the state has a frozen copy of the initial parameters even if `reference` is false.
    A rollout computes log-probabilities under this reference policy once for all updates of a
    step."""
    regularizers: tuple[str, ...] = ()
    """The terms that are part of the training loss but not of the evaluation loss."""
    models: Mapping[str, AuxiliaryModel] = dataclasses.field(default_factory=dict)
    """Auxiliary models by name. In the train state, `auxiliary` has the parameters of trained
    auxiliary models, and `frozen` has the parameters of frozen ones. Only `params`, the model of
    the run, is loaded and exported."""
    forward: Callable[..., Outputs] | None = None
    """`forward(run, batch)` computes the outputs: `run["model"](**inputs)` runs the model, and
    `run[name](**inputs)` runs an auxiliary model. Each call has different dropout. If None, only
    the model of the run is used, on `inputs`."""
    samples: bool = False
    """Whether `forward` samples from a model, and is called as `forward(run, batch, keys)` with
    keys `[B]`. An evaluation passes the same keys for every batch."""
    whole_batch: bool = False
    """Whether the terms of an example depend on other examples of the batch, as they do with
    in-batch negatives. Such an objective does not support pmap. With micro-batches the model runs
    twice, and its outputs must be floats with a row for each example; see `engine.grad_cache`."""

    def weights(self, step: Array) -> Terms:
        """Returns the weight of each term in the loss of a training step."""
        weights = {name: jnp.float32(x) for name, x in self.coefficients.items()}
        for name, num_steps in self.ramps.items():
            weights[name] *= jnp.square(jnp.minimum(1.0, step / num_steps))
        return weights

    @property
    def needs_initial(self) -> bool:
        """Whether the state keeps a frozen copy of the initial parameters."""
        return self.reference or self.keeps_initial

    def differences(self, params: Params) -> Params:
        """Returns the parameters, with learned differences in place of `followed` parameters.

        Weight decay applies to the differences.
        """
        return self._add_followed(params, -1)

    def followed(self, updates: Params) -> Params:
        """Adds the updates of `followed` parameters to the updates of the run's model."""
        return self._add_followed(updates, 1)

    def _add_followed(self, tree: Params, sign: int) -> Params:
        main, auxiliary = split(tree)
        for name, model in self.models.items():
            for part in model.followed:
                other = auxiliary[name][part]
                main[part] = jax.tree.map(lambda x, y: x + sign * y, main[part], other)
        return joined(main, auxiliary or None)

    def initial_models(
        self, rng: Array, params: Params | None = None
    ) -> tuple[Params | None, Params | None]:
        """Returns the initial parameters of the trained auxiliary models, and of the frozen ones.

        A result is None if the objective has no such models. Pass the results to
        `init_state(params, tx, frozen, auxiliary)`.

        Args:
            rng: the key.
            params: the initial parameters of the model of the run. `followed` parameters get
              their initial values from these.
        """
        trained, frozen = {}, {}
        for index, (name, model) in enumerate(self.models.items()):
            initial = trained if model.trained else frozen
            initial[name] = model.init(jax.random.fold_in(rng, index))
        if params is not None:
            # `followed` parameters start equal in both models, so that the learned difference
            # starts at 0.
            trained = self.with_followed(trained, params)
        return trained or None, {AUXILIARY: frozen} if frozen else None

    def with_followed(self, auxiliary: Params, params: Params) -> Params:
        """Sets the `followed` parameters of the trained auxiliary models to those in `params`."""
        updated = {}
        for name, tree in auxiliary.items():
            followed = {part: params[part] for part in self.models[name].followed}
            updated[name] = {**tree, **jax.tree.map(jnp.copy, followed)}
        return updated

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
            params: the parameters of the model and of trained auxiliary models; see `joined`.
            batch: a batch or a micro-batch.
            frozen: the frozen parameters of the train state, including the parameters of frozen
              auxiliary models.
            rng: keys `[B]` for dropout, or None.
        """
        main, trained = split(params)
        if self.forward is None:
            return self._model_outputs(apply_fn, main, batch, rng)
        batch = NamedArrays(batch)
        # `forward` determines the order of the models and their inputs.
        run = {"model": _bound_each(apply_fn, main, rng)}
        _, fixed = split(jax.lax.stop_gradient(frozen or {}))
        for name, model in self.models.items():
            # Dropout differs between the models. The model of the run folds small integers into its
            # keys, so fold a checksum of the name into the keys of this model.
            checksum = zlib.crc32(name.encode())
            keys = fold_in(rng, checksum) if model.trained and rng is not None else None
            chosen = trained if model.trained else fixed
            shared = {part: main[part] for part in model.shared}
            run[name] = _bound(model.apply_fn, {**chosen[name], **shared}, keys)
        if not self.samples:
            return self.forward(run, batch)
        # Without keys, as in an evaluation, every batch gets the same keys.
        num_examples = next(iter(batch.values())).shape[0]
        keys = row_keys(jax.random.key(0), num_examples) if rng is None else rng
        return self.forward(run, batch, fold_in(keys, zlib.crc32(b"samples")))

    def _model_outputs(
        self, apply_fn: ApplyFn, params: Params, batch: Batch, rng: Array | None
    ) -> Outputs:
        inputs = self.inputs(NamedArrays(batch))
        # Each run of the model has different dropout keys.
        if isinstance(inputs, tuple):
            return tuple(
                _bound(apply_fn, params, fold_in(rng, index))(**arguments)
                for index, arguments in enumerate(inputs)
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
            batch: a batch or a micro-batch.
            frozen: the frozen parameters of the train state, if the objective has a `reference`.
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
        # `frozen` may also have the parameters of auxiliary models; leave these out.
        reference_params = jax.lax.stop_gradient(split(frozen)[0])
        reference = self._model_outputs(apply_fn, reference_params, batch, None)
        return outputs, jax.lax.stop_gradient(reference)

    def sums(self, outputs: tuple[Outputs, ...], batch: Batch) -> Terms:
        """Computes the terms from the results of `all_outputs`."""
        main, *reference = outputs
        return self.checked(self.terms(main, NamedArrays(batch), *reference), "terms")

    def checked_counts(self, batch: Batch) -> Terms:
        """Returns the results of `counts` after checking them.

        Raises:
            UserError: the batch lacks an array, or `counts` did not return a scalar for each
              coefficient.
        """
        return self.checked(self.counts(NamedArrays(batch)), "counts")

    def checked(self, values: Any, function: str) -> Terms:
        """Checks the results of `terms` or `counts` against `coefficients`, and returns them.

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
        # None and strings also have the shape (), so check the type first.
        for name, value in values.items():
            is_number = isinstance(value, jax.Array | np.ndarray | np.generic | int | float)
            actual = f"shape {np.shape(value)}" if is_number else f"type {type(value).__name__}"
            require(
                actual == "shape ()",
                f"{function}[{name!r}] of the objective has the {actual}: return a scalar, such as "
                "the sum over the examples",
            )
        missing = sorted(self.coefficients.keys() - values.keys())
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


def joined(params: Params, auxiliary: Params | None) -> Params:
    """Joins the parameters of the model and of the trained auxiliary models into one tree."""
    return params if auxiliary is None else {**params, AUXILIARY: auxiliary}


def split(params: Params) -> tuple[Params, Params]:
    """Splits a tree from `joined` into the parameters of the model and of auxiliary models."""
    return {name: x for name, x in params.items() if name != AUXILIARY}, params.get(AUXILIARY, {})


def _bound(apply_fn: ApplyFn, params: Params, rng: Array | None) -> RunModel:
    """Returns a function that runs a model with the given parameters and dropout keys."""

    def run(**inputs: Array) -> Outputs:
        dropout = {} if rng is None else {"rng": _keys_of_rows(rng, inputs)}
        return apply_fn({"params": params}, **dropout, **inputs)

    return run


def _bound_each(apply_fn: ApplyFn, params: Params, rng: Array | None) -> RunModel:
    """Does the same as `_bound`, but with different dropout keys for each run of the model."""
    runs = itertools.count()

    def run(**inputs: Array) -> Outputs:
        index = next(runs)
        # The first run folds small integers into its keys, so fold a checksum for later runs.
        keys = fold_in(rng, zlib.crc32(f"run {index}".encode())) if index else rng
        return _bound(apply_fn, params, keys)(**inputs)

    return run


def _keys_of_rows(keys: Array, inputs: Inputs) -> Array:
    """Derives a key for each row of the inputs from the key of its example, `[B]`."""
    rows = next(iter(inputs.values())).shape[0]
    if rows == keys.shape[0]:
        return keys
    # An example can have several consecutive rows. Each row gets a different key.
    of_each = [fold_in(keys, index) for index in range(rows // keys.shape[0])]
    # [B, rows of an example] to [B · rows of an example].
    return jnp.stack(of_each, axis=1).reshape(rows)


def select_inputs(*names: str) -> Callable[[Batch], Inputs]:
    """Returns a function that selects, from a batch, the arrays whose names are in `names`."""
    return lambda batch: {name: batch[name] for name in names if name in batch}


def packed_weights(segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns 1 for each token of a packed sequence, 0 for padding."""
    return (segment_ids != 0).astype(jnp.float32)


def row_weights(batch: Batch) -> Float[Array, " B"]:
    """Returns 1 for real rows and 0 for filler; in multiple choice, one value per question."""
    # [B, T], or [B, choices, T]; the first token of a row is real unless the row is filler.
    mask = batch["attention_mask"]
    return mask.reshape(mask.shape[0], -1)[:, 0].astype(jnp.float32)


ENCODER_INPUTS = select_inputs("input_ids", "attention_mask", "token_type_ids")
"""The inputs of a classifier on an encoder."""
