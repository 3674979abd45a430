"""The kernels of ``duohead.kernels``, launched on JAX arrays through jax-triton (optional)."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from duohead.kernels import layout
from duohead.plan import Plan
from duohead.statistics import Columns, Inputs, rows_of
from duohead_jax.sharding import vary, varying


class Call(NamedTuple):
    """One pass as the kernels see it: rows in two dimensions, tokens in one."""

    logits: jax.Array
    valid: jax.Array
    labels: jax.Array | None
    teachers: tuple[jax.Array, ...]
    hyper: jax.Array


class Shape(NamedTuple):
    """What a launch depends on beside the plan, static."""

    plan: Plan
    rows: int
    width: int
    size: int
    padded: bool
    labels: bool


def make_call(logits: jax.Array, hyper: jax.Array, inputs: Inputs) -> Call:
    """A pass's arrays in the form that the kernels take."""
    width = logits.shape[-1]
    labels = None if inputs.labels is None else inputs.labels.reshape(-1)
    teachers = tuple(array.reshape(-1, width) for array in inputs.teachers)
    return Call(logits.reshape(-1, width), inputs.valid.reshape(-1), labels, teachers, hyper)


def shape_of(plan: Plan, call: Call, columns: Columns) -> Shape:
    rows, width = call.logits.shape
    return Shape(plan, rows, width, columns.size, columns.padded, call.labels is not None)


@functools.cache
def _jax_triton() -> Any:
    """jax-triton, whose import would leave Triton no cache folder: torch's kernels in the same process need one."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    module = importlib.import_module("jax_triton")
    if folder:
        os.environ["TRITON_CACHE_DIR"] = folder
    else:
        os.environ.pop("TRITON_CACHE_DIR", None)
    return module


def start(
    made: Any, values: Mapping[str, Any], outputs: Mapping[str, Any], aliases: Mapping[str, str] | None = None
) -> dict[str, jax.Array]:
    """One launch; ``aliases`` names the input whose memory an output takes over."""
    kernel = made.kernel
    # jax-triton types what a launch gives as the same on every device of a mesh: it varies as its inputs do.
    axes = frozenset[str]().union(*(varying(values[name]) for name in kernel.inputs))
    if made.grid == 0:
        zeros = {name: jnp.zeros(outputs[name].shape, outputs[name].dtype) for name in kernel.outputs}
        return {name: vary(array, axes) for name, array in zeros.items()}
    jax_triton = _jax_triton()
    taken = {kernel.inputs.index(source): kernel.outputs.index(target) for source, target in (aliases or {}).items()}
    found = jax_triton.triton_call(
        *(values[name] for name in (*kernel.inputs, *kernel.scalars)),
        kernel=kernel.function,
        out_shape=[outputs[name] for name in kernel.outputs],
        grid=made.grid,
        num_warps=made.warps,
        input_output_aliases=taken,
        **made.constants,
    )
    return {name: vary(array, axes) for name, array in zip(kernel.outputs, found, strict=True)}


@functools.cache
def _device() -> Any:
    from duohead.kernels.launch import Device

    device = jax.devices()[0]
    major, _, minor = str(getattr(device, "compute_capability", "0.0")).partition(".")
    return Device(10 * int(major) + int(minor or 0), int(getattr(device, "core_count", 1)))


def _float(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class _Launcher:
    """Launches the row kernels of one call; rows are contiguous in JAX."""

    def __init__(self, shape: Shape, call: Call, gradient: Any = None) -> None:
        from duohead.kernels import launch, sweeps

        self.shape, self.call, self.launch, self.gradient = shape, call, launch, gradient
        arrays = {f"teacher{a}": call.teachers[a] for a in sweeps.teacher_arrays(shape.plan)}
        strides = dict.fromkeys(("logits", *arrays, "gradient"), shape.width)
        self.unit = launch.unit_of(shape.width, strides)
        self.values: dict[str, Any] = {
            "logits": call.logits,
            "valid": call.valid,
            "labels": call.labels,
            "hyper": call.hyper,
            **arrays,
            **launch.row_scalars(shape.rows, shape.width, shape.size, strides, self.unit),
        }

    def run(
        self,
        kind: str,
        kernel: Any,
        outputs: dict[str, Any],
        programs: int | None = None,
        aliases: Mapping[str, str] | None = None,
        **values: Any,
    ) -> dict[str, jax.Array]:
        """Launches a kernel over the rows, or over fewer programs."""
        shape = self.shape
        made = self.launch.row_launch(
            kind,
            kernel,
            shape.plan,
            shape.width,
            self.call.logits.dtype.itemsize,
            self.unit,
            True,
            _device(),
            shape.rows if programs is None else programs,
        )
        if self.gradient is not None:
            outputs = outputs | {"gradient": jax.ShapeDtypeStruct((shape.rows, shape.width), self.gradient)}
        return start(made, self.values | values, outputs, aliases)


def _flags(shape: Shape, **more: bool) -> Any:
    from duohead.kernels.build import Flags

    return Flags(shape.labels, shape.padded, False, **more)


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """A launch under ``vmap``: one launch after the other, for a kernel has no batching rule."""
    return jax.custom_batching.sequential_vmap(function)


def statistics(shape: Shape, call: Call) -> jax.Array:
    """The partial rows ``[rows_of(plan), T]``: one launch."""
    from duohead.kernels import build

    kernel = build.statistics(shape.plan, _flags(shape, gradient=False))
    outputs = {"rows": _float(len(rows_of(shape.plan)), shape.rows)}
    return in_turn(lambda call: _Launcher(shape, call).run("statistics", kernel, outputs)["rows"])(call)


def jsd(shape: Shape, call: Call, saved: jax.Array) -> jax.Array:
    """The JSD's rows: one launch."""
    from duohead.kernels import build, sweeps

    kernel = build.jsd(shape.plan, _flags(shape, gradient=False))
    outputs = {"rows": _float(len(sweeps.jsd_sums(shape.plan)), shape.rows)}

    def launch(call: Call, saved: jax.Array) -> jax.Array:
        return _Launcher(shape, call).run("jsd", kernel, outputs, saved=saved)["rows"]

    return in_turn(launch)(call, saved)


def write(
    shape: Shape,
    call: Call,
    saved: jax.Array,
    upstream: jax.Array,
    dtype: Any,
    old: jax.Array | None = None,
    accumulate: bool = False,
) -> jax.Array:
    """The gradient ``[T, V]``. ``old``, whose memory it takes, is added to or, without ``accumulate``, kept where
    upstream is 1."""
    from duohead.kernels import build
    from duohead.kernels import launch as launches

    check = old is not None and not accumulate
    kernel = build.write(shape.plan, _flags(shape, accumulate=accumulate, check=check))
    programs = launches.check_programs(shape.rows, _device()) if check else None
    aliases = None if old is None else {"old": "gradient"}

    def launch(call: Call, saved: jax.Array, upstream: jax.Array, old: jax.Array | None) -> jax.Array:
        launcher = _Launcher(shape, call, dtype)
        values = {"saved": saved, "upstream": upstream, "old": old}
        return launcher.run("write", kernel, {}, programs, aliases, **values)["gradient"]

    return in_turn(launch)(call, saved, upstream, old)


class Fused(NamedTuple):
    """What one fused launch gives."""

    scalars: layout.Scalars
    rows: jax.Array
    saved: jax.Array
    gradient: jax.Array | None


def fused(
    shape: Shape,
    call: Call,
    extras: dict[str, Any],
    upstream: jax.Array | None,
    dtype: Any,
    old: jax.Array | None,
) -> Fused:
    """Losses, metrics and (with an upstream) the gradient: one launch over the vocabulary, three small ones."""
    from duohead.kernels import build
    from duohead.kernels import launch as launches

    plan, count = shape.plan, shape.rows
    described = layout.layout_of(plan)
    flags = _flags(shape, gradient=upstream is not None, accumulate=old is not None)
    outputs = {"rows": _float(len(described.stored), count), "saved": _float(len(layout.saved_names(plan)), count)}
    chunks = launches.chunks_of(count)

    def launch(call: Call, extras: dict[str, Any], upstream: jax.Array | None, old: jax.Array | None) -> Fused:
        values = dict(extras)
        if "valid_count" in build.extra_inputs(plan) and "valid_count" not in values:
            counting = launches.count_launch(build.count_valid())
            given = {"valid": call.valid, "count_rows": count}
            values["valid_count"] = start(counting, given, {"valid_count": _float(1)})["valid_count"]
        launcher = _Launcher(shape, call, None if upstream is None else dtype)
        aliases = None if old is None else {"old": "gradient"}
        kernel = build.fused(plan, flags)
        found = launcher.run("fused", kernel, outputs, None, aliases, upstream=upstream, old=old, **values)
        values |= {"valid": call.valid, "rows": found["rows"], "hyper": call.hyper, "count_rows": count}
        values["chunks_token"] = chunks
        partial = launches.partial_launch(build.partial(plan), count)
        values |= start(partial, values, {"partials_token": _float(len(described.reductions), chunks)})
        return Fused(_results(plan, values), found["rows"], found["saved"], found.get("gradient"))

    return in_turn(launch)(call, extras, upstream, old)


#: pointers that one launch takes: 4 KB of parameters, less some
MAX_LEAVES = 480


def _results(plan: Plan, values: Mapping[str, Any]) -> layout.Scalars:
    """Losses and metrics, each in a buffer of its own where a launch takes so many: XLA copies out one by one."""
    from duohead.kernels import build, launch

    leaves = layout.leaf_count(plan)
    if leaves > MAX_LEAVES:
        count = layout.scalar_count(plan)
        found = start(launch.results_launch(build.results(plan)), values, {"scalars": _float(count)})
        return layout.of_vector(plan, layout.layout_of(plan), [found["scalars"][n] for n in range(count)])
    kernel = build.results(plan, leaves=True)
    found = start(launch.results_launch(kernel), values, dict.fromkeys(kernel.outputs, _float()))
    return layout.of_leaves(plan, layout.layout_of(plan), [found[name] for name in kernel.outputs])


class Segments(NamedTuple):
    """Which sequence each token belongs to, ``[T]``, and the pairs ``[pairs, 2]`` where there are any."""

    ids: jax.Array
    pairs: jax.Array | None


def _run(launched: Sequence[Any], values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Launches in order, and the values with what they give."""
    from duohead.kernels.between import INTEGERS

    found = dict(values)
    outputs = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32 if name in INTEGERS else jnp.float32)
        for name, shape in shapes.items()
    }
    for made in launched:
        found |= start(made, found, outputs)
    return found


def sequence_lengths(valid: jax.Array, ids: jax.Array, number: int, per_token: bool) -> dict[str, jax.Array]:
    """``valid_count``, ``sequence_count`` and, with ``per_token``, the ``lengths`` of the tokens' sequences."""
    from duohead.kernels import between
    from duohead.kernels.sequences import COUNTED

    over = between.Over(valid.shape[0], number)

    def launch(valid: jax.Array, ids: jax.Array) -> dict[str, jax.Array]:
        given = {"valid": valid, "segment_ids": ids, **between.scalars(over)}
        values = _run(between.lengths(over, per_token), given, between.shapes(over))
        found = {name: values["counts"][COUNTED[name]] for name in ("valid_count", "sequence_count")}
        return found | ({"lengths": values["lengths"]} if per_token else {})

    return in_turn(launch)(valid, ids)


def sequenced(shape: Shape, call: Call, tokens: Sequence[jax.Array], segments: Segments, number: int) -> Fused:
    """Losses, metrics and what the write needs where terms are over sequences: one read, small launches after."""
    from duohead.kernels import between, build, terms

    plan = shape.plan
    over = between.Over(shape.rows, number, None if segments.pairs is None else segments.pairs.shape[0])
    outputs = {"rows": _float(len(terms.read_names(plan)), shape.rows)}

    def launch(call: Call, tokens: Sequence[jax.Array], segments: Segments) -> Fused:
        values: dict[str, Any] = {f"token{n}": array for n, array in enumerate(tokens)}
        values |= {"valid": call.valid, "hyper": call.hyper, "size": shape.size, **between.scalars(over)}
        values |= {"segment_ids": segments.ids, "pairs": segments.pairs}
        kernel = build.read(plan, _flags(shape, gradient=False))
        values |= _Launcher(shape, call).run("statistics", kernel, outputs)
        values = _run(between.terms(plan, over), values, between.shapes(over, plan))
        return Fused(_results(plan, values), values["rows"], values["saved"], None)

    return in_turn(launch)(call, tokens, segments)
