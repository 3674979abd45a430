"""The engine under jit, with its own derivative: forward saves [tokens] vectors, backward is the write."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from duohead import engine
from duohead.plan import Plan
from duohead.statistics import Columns, Inputs
from duohead.token_statistics import StatisticsPlan, evaluate_statistics, fold_statistics
from duohead_jax import namespace
from duohead_jax.sharding import Axes


class Arrays(NamedTuple):
    """The arrays of one pass; hyperparameters are one vector."""

    hyper: Any  # a vector [slots], which the engine indexes as a sequence
    labels: jax.Array | None
    valid: jax.Array
    teachers: tuple[jax.Array, ...]
    tokens: tuple[jax.Array, ...]
    segment_ids: jax.Array | None
    preference_pairs: jax.Array | None


class Static(NamedTuple):
    """What is compiled in: the plans, the vocabulary and the mesh axes."""

    plans: tuple[Plan, ...]
    size: int
    padded: bool
    num_segments: int
    axes: Axes


def inputs_of(arrays: Arrays, num_segments: int) -> Inputs:
    """A pass's arrays as the engine takes them."""
    return Inputs(
        arrays.labels,
        arrays.valid,
        arrays.teachers,
        arrays.tokens,
        arrays.segment_ids,
        arrays.preference_pairs,
        num_segments,
    )


def columns_of(static: Static, logits: jax.Array) -> Columns:
    """Which columns of the vocabulary the logits hold."""
    return Columns(static.axes.start(logits.shape[-1]), static.size, static.padded)


def _evaluate(static: Static, logits: jax.Array, passes: tuple[Arrays, ...]) -> list[engine.Evaluation]:
    columns = columns_of(static, logits)
    return [
        engine.evaluate(
            namespace,
            plan,
            arrays.hyper,
            logits,
            inputs_of(arrays, static.num_segments),
            columns,
            static.axes,
            static.axes.vocab is not None,
            static.axes.sequence is not None,
        )
        for plan, arrays in zip(static.plans, passes, strict=True)
    ]


def _gradient(
    static: Static, logits: jax.Array, passes: tuple[Arrays, ...], saved: tuple[Any, ...], upstream: jax.Array
) -> jax.Array:
    """The combined gradient in the compute dtype."""
    written = [
        (plan, arrays.hyper, inputs_of(arrays, static.num_segments), normalisers, coefficients)
        for plan, arrays, (normalisers, coefficients) in zip(static.plans, passes, saved, strict=True)
    ]
    return engine.combined_gradient(namespace, written, logits, columns_of(static, logits), upstream)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static: Static, logits: jax.Array, passes: tuple[Arrays, ...]) -> tuple[jax.Array, Any]:
    return engine.joined(_evaluate(static, logits, passes))


def _loss_forward(static: Static, logits: jax.Array, passes: tuple[Arrays, ...]) -> Any:
    evaluations = _evaluate(static, logits, passes)
    saved = tuple((evaluation.normalisers, evaluation.coefficients) for evaluation in evaluations)
    return engine.joined(evaluations), (logits, passes, saved)


def _loss_backward(static: Static, residuals: Any, cotangents: Any) -> Any:
    logits, passes, saved = residuals
    gradient = _gradient(static, logits, passes, saved, cotangents[0])
    return static.axes.match(gradient.astype(logits.dtype), logits), None


_loss.defvjp(_loss_forward, _loss_backward)

loss = jax.jit(_loss, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def loss_and_grad(
    static: Static,
    accumulate: bool,
    logits: jax.Array,
    passes: tuple[Arrays, ...],
    grad_scale: jax.Array,
    out: jax.Array | None,
) -> tuple[tuple[jax.Array, Any], jax.Array]:
    """Loss, aux and the gradient in the logits' (or ``out``'s) dtype, rounded once."""
    evaluations = _evaluate(static, logits, passes)
    saved = tuple((evaluation.normalisers, evaluation.coefficients) for evaluation in evaluations)
    gradient = _gradient(static, logits, passes, saved, grad_scale)
    if out is not None and accumulate:
        gradient = gradient + out
    return engine.joined(evaluations), gradient.astype(logits.dtype if out is None else out.dtype)


class StatisticsStatic(NamedTuple):
    """What is compiled in for ``token_statistics``."""

    wanted: StatisticsPlan
    size: int
    padded: bool
    axes: Axes


def _statistics_call(static: StatisticsStatic, logits: jax.Array, arrays: Arrays) -> Any:
    columns = Columns(static.axes.start(logits.shape[-1]), static.size, static.padded)
    return evaluate_statistics(
        namespace,
        static.wanted,
        arrays.hyper,
        logits,
        inputs_of(arrays, 0),
        columns,
        static.axes,
        static.axes.vocab is not None,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(static: StatisticsStatic, logits: jax.Array, arrays: Arrays) -> list[jax.Array]:
    return _statistics_call(static, logits, arrays)[0]


def _statistics_forward(static: StatisticsStatic, logits: jax.Array, arrays: Arrays) -> Any:
    values, found, normalisers = _statistics_call(static, logits, arrays)
    keys = tuple(found)
    return values, (logits, arrays, _Keyed(keys, tuple(found[key] for key in keys)), normalisers)


def _statistics_backward(static: StatisticsStatic, residuals: Any, cotangents: Any) -> Any:
    logits, arrays, keyed, normalisers = residuals
    columns = Columns(static.axes.start(logits.shape[-1]), static.size, static.padded)
    inputs = inputs_of(arrays, 0)
    coefficients = fold_statistics(namespace, static.wanted, arrays.hyper, keyed.as_dict(), inputs, columns, cotangents)
    gradient = engine.write(
        namespace, static.wanted.plan, arrays.hyper, logits, inputs, columns, normalisers, coefficients
    )
    return static.axes.match(gradient.astype(logits.dtype), logits), None


_statistics.defvjp(_statistics_forward, _statistics_backward)
statistics = jax.jit(_statistics, static_argnums=0)


@jax.tree_util.register_pytree_node_class
class _Keyed:
    """A dict whose keys are tuples, which pytrees of dicts could not sort."""

    def __init__(self, keys: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        self.keys, self.values = keys, values

    def as_dict(self) -> dict[Any, Any]:
        return dict(zip(self.keys, self.values, strict=True))

    def tree_flatten(self) -> tuple[Any, Any]:
        return self.values, self.keys

    @classmethod
    def tree_unflatten(cls, keys: Any, values: Any) -> _Keyed:
        return cls(keys, tuple(values))


def hyper_vector(values: list[Any], logits: jax.Array) -> jax.Array:
    """All hyperparameters as one vector in the compute dtype: runtime values."""
    dtype = namespace.compute_dtype(logits)
    if all(isinstance(value, (int, float)) for value in values):
        return jnp.asarray([float(value) for value in values], dtype)
    return jnp.stack([jax.lax.stop_gradient(jnp.asarray(value, dtype)) for value in values])
