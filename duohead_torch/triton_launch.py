"""The kernels of ``duohead.kernels``, launched on torch tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from duohead.kernels import layout, terms
from duohead.plan import Plan
from duohead.statistics import Columns, Inputs, rows_of
from duohead_torch.plan_key import plan_key


class Call(NamedTuple):
    """One pass as the kernels see it: rows in two dimensions, tokens in one, hyperparameters in one vector."""

    plan: Plan
    logits: torch.Tensor
    valid: torch.Tensor
    labels: torch.Tensor | None
    teachers: tuple[torch.Tensor, ...]
    hyper: torch.Tensor
    start: torch.Tensor | None
    size: int
    padded: bool


def make_call(plan: Plan, hyper: torch.Tensor, logits: torch.Tensor, inputs: Inputs, columns: Columns) -> Call:
    """A pass's arrays in the form that the kernels take, ``hyper`` a vector; contiguous ones are not copied."""
    labels = None if inputs.labels is None else inputs.labels.reshape(-1).contiguous()
    start = None
    if isinstance(columns.start, torch.Tensor) or columns.start != 0:
        start = torch.as_tensor(columns.start, dtype=torch.int32, device=logits.device).reshape(1)
    return Call(
        plan,
        as_rows(logits),
        inputs.valid.reshape(-1).contiguous(),
        labels,
        tuple(as_rows(array) for array in inputs.teachers),
        hyper,
        start,
        columns.size,
        columns.padded,
    )


def as_rows(array: torch.Tensor) -> torch.Tensor:
    """``(*tokens, V)`` as ``[T, V]``, a view where strides allow, with adjacent columns."""
    rows = array.reshape(array.numel() // array.shape[-1] if array.shape[-1] else 0, array.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def hyper_vector(hyper: Sequence[torch.Tensor]) -> torch.Tensor:
    """The vector whose elements the hyperparameters are, where they are one's; else a new one."""
    if not torch.compiler.is_compiling():
        base = hyper[0]._base
        if base is not None and base.shape == (len(hyper),) and base.dtype == torch.float32:
            return base
    return torch.stack(list(hyper)).to(torch.float32)


@functools.cache
def _device(index: int | None) -> Any:
    from duohead.kernels.launch import Device

    if index is None:
        return Device(0, 1)
    found = torch.cuda.get_device_properties(index)
    return Device(10 * found.major + found.minor, found.multi_processor_count)


class _Launcher:
    """Launches the row kernels of one call."""

    def __init__(self, call: Call, gradient: torch.Tensor | None = None) -> None:
        from duohead.kernels import launch, sweeps

        self.call, self.launch = call, launch
        self.rows, self.width = call.logits.shape
        arrays = {f"teacher{a}": call.teachers[a] for a in sweeps.teacher_arrays(call.plan)}
        self.device = _device(call.logits.device.index)
        strides = {"logits": call.logits.stride(0)} | {name: array.stride(0) for name, array in arrays.items()}
        pointers = [call.logits, *arrays.values()]
        self.values: dict[str, Any] = {
            "logits": call.logits,
            "valid": call.valid,
            "labels": call.labels,
            "hyper": call.hyper,
            "shard_start": call.start,
            **arrays,
        }
        if gradient is not None:
            strides["gradient"] = gradient.stride(0)
            self.values["gradient"] = self.values["old"] = gradient
            pointers.append(gradient)
        self.unit = launch.unit_of(self.width, strides)
        self.aligned = all(array.data_ptr() % 16 == 0 for array in pointers)
        self.values |= launch.row_scalars(self.rows, self.width, call.size, strides, self.unit)

    def run(self, kind: str, kernel: Any, programs: int | None = None, **values: Any) -> None:
        """Launches a kernel over the rows, or over fewer programs."""
        call = self.call
        item_size = call.logits.element_size()
        grid = self.rows if programs is None else programs
        made = self.launch.row_launch(
            kind, kernel, call.plan, self.width, item_size, self.unit, self.aligned, self.device, grid
        )
        last_launch[kind] = _start(made, self.values | values)


#: kind → the compiled kernel that was launched last, for benchmarks
last_launch: dict[str, Any] = {}


def _start(made: Any, values: dict[str, Any]) -> Any:
    from duohead.kernels.launch import arguments

    if made.grid == 0:
        return None
    return made.kernel.function[(made.grid,)](
        *arguments(made.kernel, values), **made.constants, num_warps=made.warps, enable_fp_fusion=True
    )


def _flags(call: Call, **more: bool) -> Any:
    from duohead.kernels.build import Flags

    return Flags(call.labels is not None, call.padded, call.start is not None, **more)


def statistics(call: Call) -> torch.Tensor:
    """The partial rows ``[rows_of(plan), T]``: one launch."""
    if torch.compiler.is_compiling():
        return torch.ops.duohead.statistics(*_operands(call))
    from duohead.kernels import build

    rows = call.hyper.new_empty(len(rows_of(call.plan)), call.logits.shape[0])
    kernel = build.statistics(call.plan, _flags(call, gradient=False))
    _Launcher(call).run("statistics", kernel, rows=rows)
    return rows


def jsd(call: Call, saved: torch.Tensor) -> torch.Tensor:
    """The JSD's rows: one launch."""
    if torch.compiler.is_compiling():
        return torch.ops.duohead.jsd(*_operands(call), saved)
    from duohead.kernels import build, sweeps

    rows = call.hyper.new_empty(len(sweeps.jsd_sums(call.plan)), call.logits.shape[0])
    _Launcher(call).run("jsd", build.jsd(call.plan, _flags(call, gradient=False)), rows=rows, saved=saved)
    return rows


def write(
    call: Call,
    saved: torch.Tensor,
    upstream: torch.Tensor,
    gradient: torch.Tensor,
    accumulate: bool = False,
    check: bool = False,
) -> None:
    """Writes the gradient ``[T, V]`` (adds to it, with ``accumulate``); with ``check``, only if upstream is not 1."""
    if torch.compiler.is_compiling():
        torch.ops.duohead.write(*_operands(call), saved, upstream, gradient, accumulate)
        return
    from duohead.kernels import build, launch

    launcher = _Launcher(call, gradient)
    kernel = build.write(call.plan, _flags(call, accumulate=accumulate, check=check))
    programs = launch.check_programs(launcher.rows, launcher.device) if check else None
    launcher.run("write", kernel, programs, saved=saved, upstream=upstream)


def _operands(call: Call) -> tuple[Any, ...]:
    """A call as the first operands of an operator of ``triton_ops``."""
    return (plan_key(call.plan), *call[1:4], list(call.teachers), *call[5:])


class Fused(NamedTuple):
    """What one fused launch gives: the results' vector, per-token rows, and what a later write needs."""

    scalars: torch.Tensor
    rows: torch.Tensor
    saved: torch.Tensor


def fused(
    call: Call,
    tokens: Sequence[torch.Tensor],
    extras: dict[str, torch.Tensor | None],
    upstream: torch.Tensor | None = None,
    gradient: torch.Tensor | None = None,
    accumulate: bool = False,
) -> Fused:
    """Losses, metrics and (with ``gradient``) the gradient: one launch over the vocabulary, three small ones."""
    if torch.compiler.is_compiling():
        found = torch.ops.duohead.fused(*_operands(call), tokens, extras.get("lengths"), extras.get("sequence_count"))
        return Fused(*found)
    from duohead.kernels import build

    plan, make = call.plan, call.hyper.new_empty
    count = call.logits.shape[0]
    rows = make(len(layout.layout_of(plan).stored), count)
    saved = make(len(layout.saved_names(plan)), count)
    values: dict[str, Any] = {f"token{n}": array for n, array in enumerate(tokens)}
    values |= extras
    _count_valid(call, values)
    kernel = build.fused(plan, _flags(call, gradient=gradient is not None, accumulate=accumulate))
    _Launcher(call, gradient).run("fused", kernel, rows=rows, saved=saved, upstream=upstream, **values)
    return Fused(reduce(call, rows, values), rows, saved)


def _count_valid(call: Call, values: dict[str, Any]) -> None:
    """Counts the valid tokens where a reduction needs their number and nothing has counted them yet."""
    from duohead.kernels import build, launch

    if "valid_count" in build.extra_inputs(call.plan) and "valid_count" not in values:
        values["valid_count"] = call.hyper.new_empty(1)
        given = {"valid": call.valid, "count_rows": call.logits.shape[0], "valid_count": values["valid_count"]}
        _start(launch.count_launch(build.count_valid()), given)


def reduce(call: Call, rows: torch.Tensor, values: dict[str, Any]) -> torch.Tensor:
    """Statistics per token → the results' vector, in a fixed order: two small launches."""
    from duohead.kernels import build, launch

    plan, count = call.plan, call.logits.shape[0]
    chunks = launch.chunks_of(count)
    partials = call.hyper.new_empty(len(layout.layout_of(plan).reductions), chunks)
    scalars = call.hyper.new_empty(layout.scalar_count(plan))
    values = values | {
        "valid": call.valid,
        "rows": rows,
        "hyper": call.hyper,
        "count_rows": count,
        "chunks_token": chunks,
    }
    values |= {"partials_token": partials, "scalars": scalars}
    _start(launch.partial_launch(build.partial(plan), count), values)
    _start(launch.results_launch(build.results(plan)), values)
    return scalars


class Segments(NamedTuple):
    """Each token's sequence ``[T]``, the pairs ``[pairs, 2]`` where there are any, and the number of sequences."""

    ids: torch.Tensor
    pairs: torch.Tensor | None
    number: int


def _run(launched: Sequence[Any], values: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Launches in order, each into buffers of its own, which join the values."""
    from duohead.kernels.between import INTEGERS

    for made in launched:
        for name in made.kernel.outputs:
            dtype = torch.int32 if name in INTEGERS else torch.float32
            values[name] = torch.empty(shapes[name], dtype=dtype, device=values["valid"].device)
        _start(made, values)


def sequence_lengths(valid: torch.Tensor, segments: Segments, per_token: bool) -> dict[str, torch.Tensor]:
    """``valid_count``, ``sequence_count`` and, with ``per_token``, the ``lengths`` of the tokens' sequences."""
    from duohead.kernels import between
    from duohead.kernels.sequences import COUNTED

    over = between.Over(valid.shape[0], segments.number)
    values: dict[str, Any] = {"valid": valid, "segment_ids": segments.ids, **between.scalars(over)}
    _run(between.lengths(over, per_token), values, between.shapes(over))
    found = {name: values["counts"][COUNTED[name]] for name in ("valid_count", "sequence_count")}
    return found | ({"lengths": values["lengths"]} if per_token else {})


def sequenced(call: Call, tokens: Sequence[torch.Tensor], segments: Segments) -> Fused:
    """Losses, metrics and what the write needs where terms are over sequences: one read, small launches after."""
    if torch.compiler.is_compiling():
        return Fused(*torch.ops.duohead.sequenced(*_operands(call), tokens, *segments))
    from duohead.kernels import build

    rows = call.hyper.new_empty(len(terms.read_names(call.plan)), call.logits.shape[0])
    _Launcher(call).run("statistics", build.read(call.plan, _flags(call, gradient=False)), rows=rows)
    return after_read(call, rows, tokens, segments)


def after_read(
    call: Call,
    rows: torch.Tensor,
    tokens: Sequence[torch.Tensor],
    segments: Segments | None,
    extras: dict[str, torch.Tensor | None] | None = None,
) -> Fused:
    """What follows a read whose ``rows`` are those of ``terms.read_names``; segments where a term is over sequences."""
    from duohead.kernels import between, build, launch

    plan, count = call.plan, call.logits.shape[0]
    over = between.Over(count)
    values: dict[str, Any] = {f"token{n}": array for n, array in enumerate(tokens)}
    values |= {**(extras or {}), "valid": call.valid, "hyper": call.hyper, "size": call.size, "rows": rows}
    if segments is None:
        _count_valid(call, values)
    else:
        over = between.Over(count, segments.number, None if segments.pairs is None else segments.pairs.shape[0])
        values |= {"segment_ids": segments.ids, "pairs": segments.pairs}
    values |= between.scalars(over)
    _run(between.terms(plan, over), values, between.shapes(over, plan))
    values["scalars"] = call.hyper.new_empty(layout.scalar_count(plan))
    _start(launch.results_launch(build.results(plan)), values)
    return Fused(values["scalars"], rows, values["saved"])


from duohead_torch import triton_ops  # noqa: E402, F401  (registers the operators)
