"""Runs passes through the kernels, inside a ``custom_vjp``: which launches a plan needs, and what is between them."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from duohead import engine
from duohead.kernels import layout
from duohead.kernels.eligible import is_fused, is_sequenced, plan_fault
from duohead.plan import Plan
from duohead.seam import token_input
from duohead.statistics import Columns, Inputs, Normalisers
from duohead_jax import namespace
from duohead_jax.triton_launch import (
    Segments,
    fused,
    jsd,
    make_call,
    sequence_lengths,
    sequenced,
    shape_of,
    statistics,
    write,
)
from duohead_jax.xla import Arrays, Static, columns_of, inputs_of

GPU_BACKENDS = ("gpu", "cuda")


def fault(static: Static, logits: jax.Array) -> str | None:
    """Why the kernels cannot run this call, or None."""
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed: pip install duohead[jax-triton]"
    if jax.default_backend() not in GPU_BACKENDS:
        return f"it needs a CUDA device, JAX runs on {jax.default_backend()}"
    if logits.dtype == jnp.float64:
        return "float64 logits: the kernel computes in float32; use 'xla'"
    if static.axes.vocab is not None or static.axes.sequence is not None:
        return "vocab_axis and sequence_axis: in JAX the kernel takes whole rows and sequences; use 'xla'"
    for plan in static.plans:
        found = plan_fault(plan)
        if found is not None:
            return f"the loss {found[0]!r}: {found[1]}"
    return None


def is_local(logits: jax.Array) -> bool:
    """Whether these logits surely lie on one device: alone there, or this device's part under shard_map or pmap.

    Under plain jit with several devices they may be sharded: XLA would gather them for a kernel that it cannot split.
    """
    if not isinstance(logits, jax.core.Tracer):
        return len(logits.sharding.device_set) == 1
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 or (bool(mesh.axis_names) and set(mesh.axis_names) == set(mesh.manual_axes))


def takes(implementation: str, static: Static, logits: jax.Array) -> bool:
    """Whether a call runs through the kernels: ``auto`` where it can, and where the logits lie on one device.

    Raises:
        RuntimeError: ``triton`` was asked for and cannot run; the message says why and what to do.
    """
    if implementation not in ("auto", "triton"):
        return False
    if implementation == "auto" and (jax.default_backend() not in GPU_BACKENDS or not is_local(logits)):
        return False
    reason = fault(static, logits)
    if reason is not None and implementation == "triton":
        raise RuntimeError(f"implementation='triton' cannot run: {reason}")
    return reason is None


class TritonSweeps:
    """The engine's reads as launches: between them and the write the seam is array code."""

    def read(
        self, xp: Any, plan: Plan, hyper: Any, logits: jax.Array, inputs: Inputs, columns: Columns
    ) -> list[jax.Array]:
        """The partial rows, in the tokens' shape."""
        call = make_call(logits, hyper, inputs)
        return [row.reshape(inputs.valid.shape) for row in statistics(shape_of(plan, call, columns), call)]

    def read_jsd(
        self,
        xp: Any,
        plan: Plan,
        hyper: Any,
        logits: jax.Array,
        inputs: Inputs,
        columns: Columns,
        normalisers: Normalisers,
    ) -> list[jax.Array]:
        """The JSD's rows, in the tokens' shape."""
        pairs = [*normalisers.softmax, *normalisers.teacher]
        saved = jnp.stack([array.reshape(-1) for pair in pairs for array in pair])
        call = make_call(logits, hyper, inputs)
        return [row.reshape(inputs.valid.shape) for row in jsd(shape_of(plan, call, columns), call, saved)]


class Done(NamedTuple):
    """A pass that has run: its evaluation, the write's rows, and the gradient where the launch wrote it."""

    evaluation: engine.Evaluation
    saved: jax.Array
    gradient: jax.Array | None


def _run(
    static: Static,
    plan: Plan,
    arrays: Arrays,
    logits: jax.Array,
    upstream: jax.Array | None = None,
    dtype: Any = None,
    old: jax.Array | None = None,
) -> Done:
    """One pass; with an upstream also its gradient, where one launch does everything."""
    columns, inputs = columns_of(static, logits), inputs_of(arrays, static.num_segments)
    call = make_call(logits, arrays.hyper, inputs)
    shape, tokens, extras = shape_of(plan, call, columns), _token_inputs(inputs), {}
    if is_fused(plan):
        extras = _lengths(plan, inputs)
        values = {f"token{n}": array for n, array in enumerate(tokens)}
        result = fused(shape, call, extras | values, upstream, dtype, old)
    elif is_sequenced(plan):
        ids: Any = inputs.segment_ids
        given = Segments(ids.reshape(-1), inputs.preference_pairs)
        result = sequenced(shape, call, tokens, given, inputs.num_segments)
    else:
        return _run_in_two(static, plan, arrays, logits, columns, inputs)
    evaluation = layout.evaluation(
        plan, layout.layout_of(plan), result.scalars, result.rows, inputs.valid.shape, extras.get("sequence_count")
    )
    return Done(evaluation, result.saved, result.gradient)


def _run_in_two(
    static: Static, plan: Plan, arrays: Arrays, logits: jax.Array, columns: Columns, inputs: Inputs
) -> Done:
    found = engine.evaluate(
        namespace, plan, arrays.hyper, logits, inputs, columns, static.axes, False, False, TritonSweeps()
    )
    rows = layout.saved_rows(layout.saved_names(plan), found.normalisers, found.coefficients)
    zero = jnp.zeros(inputs.valid.size, jnp.float32)
    return Done(
        found, jnp.stack([jnp.reshape(jnp.broadcast_to(row, inputs.valid.shape), -1) + zero for row in rows]), None
    )


def _lengths(plan: Plan, inputs: Inputs) -> dict[str, Any]:
    """Sequence lengths and counts, for one launch whose reductions or metrics need them."""
    if not (plan.needs_segments or any("num_segments" in loss.counts for loss in plan.losses)):
        return {}
    ids: Any = inputs.segment_ids
    return sequence_lengths(inputs.valid.reshape(-1), ids.reshape(-1), inputs.num_segments, plan.needs_segments)


def _token_inputs(inputs: Inputs) -> list[jax.Array]:
    """Token inputs as vectors; one per segment is carried by the segment's tokens."""
    return [token_input(namespace, array, inputs, jnp.float32).reshape(-1) for array in inputs.tokens]


def _written(
    static: Static,
    plan: Plan,
    arrays: Arrays,
    logits: jax.Array,
    saved: jax.Array,
    upstream: jax.Array,
    dtype: Any,
    old: jax.Array | None = None,
    accumulate: bool = False,
) -> jax.Array:
    call = make_call(logits, arrays.hyper, inputs_of(arrays, static.num_segments))
    shape = shape_of(plan, call, columns_of(static, logits))
    rows = None if old is None else old.reshape(-1, logits.shape[-1])
    return write(shape, call, saved, upstream.astype(jnp.float32), dtype, rows, accumulate).reshape(logits.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static: Static, logits: jax.Array, passes: tuple[Arrays, ...]) -> tuple[jax.Array, Any]:
    done = [_run(static, plan, arrays, logits) for plan, arrays in zip(static.plans, passes, strict=True)]
    return engine.joined([item.evaluation for item in done])


def _loss_forward(static: Static, logits: jax.Array, passes: tuple[Arrays, ...]) -> Any:
    (plan,), (arrays,) = static.plans, passes
    done = _run(static, plan, arrays, logits, jnp.ones((), jnp.float32), logits.dtype)
    return engine.joined([done.evaluation]), (logits, passes, done.saved, done.gradient)


def _loss_backward(static: Static, residuals: Any, cotangents: Any) -> Any:
    logits, (arrays,), saved, gradient = residuals
    (plan,) = static.plans
    written = _written(static, plan, arrays, logits, saved, cotangents[0], logits.dtype, gradient)
    return static.axes.match(written, logits), None


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
    (plan,), (arrays,) = static.plans, passes
    dtype = logits.dtype if out is None else out.dtype
    old = out if accumulate else None
    rows = None if old is None else old.reshape(-1, logits.shape[-1])
    done = _run(static, plan, arrays, logits, grad_scale.astype(jnp.float32), dtype, rows)
    if done.gradient is None:
        gradient = _written(static, plan, arrays, logits, done.saved, grad_scale, dtype, old, accumulate)
    else:
        gradient = done.gradient.reshape(logits.shape)
    return engine.joined([done.evaluation]), gradient
