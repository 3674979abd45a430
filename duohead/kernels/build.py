"""Kernels of a plan: fused, statistics, jsd and write over rows; count, partial and results over tokens."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from duohead.kernels import row, sweeps, terms
from duohead.kernels.bind import KERNEL_NAMES, bound
from duohead.kernels.layout import Layout, Reported, layout_of, leaf_count, scalar_count
from duohead.kernels.source import Kernel, indent, make_kernel
from duohead.plan import Plan

CONSTANTS = ("WARPS", "UNROLL", "AHEAD", "UNIT")


class Flags(NamedTuple):
    """What beside the plan decides the source: which arrays there are, and what is to be written."""

    labels: bool
    padded: bool
    sharded: bool = False
    gradient: bool = True
    accumulate: bool = False
    #: the gradient is there already, for an upstream of 1: return at once where it is 1
    check: bool = False


def _inputs(plan: Plan, flags: Flags) -> list[str]:
    return [
        "logits",
        "valid",
        *(["labels"] if flags.labels else []),
        *(f"teacher{a}" for a in sweeps.teacher_arrays(plan)),
        "hyper",
        *(["shard_start"] if flags.sharded else []),
    ]


def _scalars(plan: Plan, gradient: bool) -> list[str]:
    return [
        "count_rows",
        "width",
        "size",
        "logits_stride",
        *(f"teacher{a}_stride" for a in sweeps.teacher_arrays(plan)),
        *(["gradient_stride"] if gradient else []),
    ]


def token_names(plan: Plan) -> list[str]:
    """The inputs per token."""
    return [f"token{n}" for n, _ in enumerate(plan.input_names)]


def names_of(code: terms.TermCode) -> dict[str, Any]:
    """The globals of a kernel that calls terms."""
    return {**KERNEL_NAMES, **{name: bound(item) for name, item in code.functions.items()}}


def _start(plan: Plan, flags: Flags, gradient: bool) -> list[str]:
    """What every row kernel begins its row with."""
    return [
        "valid_row = tl.load(valid + row) != 0",
        *row.real_columns(flags.padded, flags.sharded),
        *row.row_pointers(plan, gradient, flags.accumulate and gradient),
        *row.place(flags.labels, flags.sharded, plan.needs_labels),
        *sweeps.scales(plan),
    ]


def _one_row(body: list[str]) -> list[str]:
    return [*sweeps.OFFSETS, "row = tl.program_id(0).to(tl.int64)", *body]


def _rows_in_turn(body: list[str]) -> list[str]:
    """The grid may be smaller than the number of rows."""
    return [
        *sweeps.OFFSETS,
        "first = tl.program_id(0)",
        "zero = first.to(tl.int64) * 0",
        "for row_number in range(first, count_rows, tl.num_programs(0)):",
        "    row = zero + row_number",
        *indent(body),
    ]


def _read(plan: Plan, flags: Flags) -> list[str]:
    accumulate = flags.accumulate and flags.gradient
    return [
        *row.read_label_column(plan, accumulate),
        *sweeps.accumulators(plan),
        *sweeps.sweep_forward(plan, "evict_last", sweeps.add_tile(plan), ahead=True),
        *sweeps.across_threads(plan),
    ]


def _write(plan: Plan, flags: Flags) -> list[str]:
    lines = [*row.apply_upstream(plan), *sweeps.sweep_backward(plan, flags.accumulate)]
    return lines + (sweeps.write_label_column(plan, flags.accumulate) if plan.needs_labels else [])


@functools.lru_cache(maxsize=256)
def fused(plan: Plan, flags: Flags) -> Kernel:
    """Everything in one launch: read, statistics, terms, fold and, where wanted, the write."""
    code = terms.RowCode(plan)
    loads, derivatives = code.lines()
    jsd = sweeps.sweep_jsd(plan) if plan.has_jsd else []
    body = [
        *_start(plan, flags, flags.gradient),
        *loads,
        *(["factor = tl.load(upstream)"] if flags.gradient else []),
        *_read(plan, flags),
        *row.statistics(plan, flags.labels),
        *jsd,
        *derivatives,
        *row.store_saved(plan),
        *code.store_statistics(),
    ]
    if flags.gradient:
        body += _write(plan, flags)
    inputs = [
        *_inputs(plan, flags),
        *token_names(plan),
        *extra_inputs(plan),
        *(["upstream"] if flags.gradient else []),
        *(["old"] if flags.accumulate and flags.gradient else []),
    ]
    outputs = ["rows", "saved", *(["gradient"] if flags.gradient else [])]
    scalars = _scalars(plan, flags.gradient)
    return make_kernel("fused", inputs, scalars, outputs, CONSTANTS, _one_row(body), names_of(code))


def extra_inputs(plan: Plan) -> tuple[str, ...]:
    """What a fused launch needs of an earlier step: the number of valid tokens, sequence lengths and their number."""
    names: list[str] = []
    if plan.num_tokens < 0 and any(loss.reduction == "token_mean" for loss in plan.losses):
        names.append("valid_count")
    if any(loss.reduction in terms.SEQUENCE_REDUCTIONS for loss in plan.losses):
        names.append("lengths")
        if plan.num_sequences < 0:
            names.append("sequence_count")
    return tuple(names)


@functools.lru_cache(maxsize=256)
def statistics(plan: Plan, flags: Flags) -> Kernel:
    """The read alone: partial rows in the order of ``duohead.statistics.rows_of``."""
    flags = flags._replace(gradient=False, accumulate=False)
    body = [*_start(plan, flags, False), *_read(plan, flags), *row.store_partial_rows(plan)]
    return make_kernel(
        "statistics", _inputs(plan, flags), _scalars(plan, False), ["rows"], CONSTANTS, _one_row(body), KERNEL_NAMES
    )


@functools.lru_cache(maxsize=256)
def read(plan: Plan, flags: Flags) -> Kernel:
    """The read alone, of whole rows: the statistics and normalisers of ``terms.read_names``."""
    flags = flags._replace(gradient=False, accumulate=False)
    body = [
        *_start(plan, flags, False),
        *_read(plan, flags),
        *row.statistics(plan, flags.labels),
        *(sweeps.sweep_jsd(plan) if plan.has_jsd else []),
        *row.store("rows", terms.read_names(plan)),
    ]
    return make_kernel(
        "read", _inputs(plan, flags), _scalars(plan, False), ["rows"], CONSTANTS, _one_row(body), KERNEL_NAMES
    )


@functools.lru_cache(maxsize=256)
def jsd(plan: Plan, flags: Flags) -> Kernel:
    """The JSD's sweep alone, from saved normalisers."""
    body = [
        *_start(plan, flags, False),
        *row.load_normalisers(plan),
        *sweeps.sweep_jsd(plan),
        *row.store("rows", sweeps.jsd_sums(plan)),
    ]
    inputs = [*_inputs(plan, flags), "saved"]
    return make_kernel("jsd", inputs, _scalars(plan, False), ["rows"], CONSTANTS, _one_row(body), KERNEL_NAMES)


@functools.lru_cache(maxsize=256)
def write(plan: Plan, flags: Flags) -> Kernel:
    """The write alone, from saved normalisers and coefficients."""
    accumulate = flags.accumulate
    label = row.read_label_column(plan, accumulate)
    each_row = [
        *_start(plan, flags, True),
        *row.load_normalisers(plan),
        *row.load_coefficients(plan),
        *label,
        # Nobody may write over the label's column before everybody has read it.
        *(["tl.debug_barrier()"] if label else []),
        "tiles = real // TILE",
        "edge = tiles * TILE",
        *_write(plan, flags),
    ]
    body = ["factor = tl.load(upstream)", *_rows_in_turn(each_row)]
    if flags.check:
        body = ["factor = tl.load(upstream)", "if factor != 1.0:", *indent(_rows_in_turn(each_row))]
    # With check the gradient is there already: a launcher that hands out fresh outputs gives it as old.
    inputs = [*_inputs(plan, flags), "saved", "upstream", *(["old"] if accumulate or flags.check else [])]
    return make_kernel("write", inputs, _scalars(plan, True), ["gradient"], CONSTANTS, body, KERNEL_NAMES)


# --- over tokens ------------------------------------------------------------------------------------------------------

#: tokens per program of the reduction's first step
CHUNK = 1024
#: what a program over a chunk of tokens begins with
CHUNK_OF_TOKENS = [
    "chunk = tl.program_id(0)",
    "tokens = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)",
    "inside = tokens < count_rows",
    "exists = tl.load(valid + tokens, mask=inside, other=0) != 0",
]


@functools.lru_cache(maxsize=1)
def count_valid() -> Kernel:
    """The number of valid tokens: one program."""
    body = [
        "offsets = tl.arange(0, CHUNK)",
        "found = tl.zeros([CHUNK], tl.int32)",
        "for begin in range(0, count_rows, CHUNK):",
        "    inside = begin + offsets < count_rows",
        "    found = found + (tl.load(valid + begin + offsets, mask=inside, other=0) != 0).to(tl.int32)",
        "tl.store(valid_count, tl.sum(found, 0).to(tl.float32))",
    ]
    return make_kernel("count", ["valid"], ["count_rows"], ["valid_count"], ["CHUNK"], body, KERNEL_NAMES)


def _reduce(layout: Layout, n: int, value: str) -> list[str]:
    op = layout.reductions[n].op
    if op == "sum":
        return [f"reduced{n} = tl.sum({value}, 0)"]
    # A maximum drops NaN: put it back.
    return [
        f"reduced{n} = tl.{op}({value}, 0)",
        f"reduced{n} = tl.where(tl.max(({value} != {value}).to(tl.int32), 0) > 0, float('nan'), reduced{n})",
    ]


_NEUTRAL = {"sum": "0.0", "min": "INFINITY", "max": "-INFINITY"}


def reduce_chunk(plan: Plan, kind: str, each: str = "1.0") -> list[str]:
    """Reduces ``row0 …`` of a chunk where ``exists`` holds, ``each`` to count; stores the kind's partial results."""
    layout, lines = layout_of(plan), []
    for place, n in enumerate(layout.of_kind(kind)):
        reduction = layout.reductions[n]
        value = f"row{reduction.row}" if reduction.row >= 0 else each
        lines.append(f"value = tl.where(exists, {value}, {_NEUTRAL[reduction.op]})")
        lines += _reduce(layout, n, "value")
        lines.append(f"tl.store(partials_{kind} + {place} * chunks_{kind} + chunk, reduced{n})")
    return lines


@functools.lru_cache(maxsize=256)
def partial(plan: Plan) -> Kernel:
    """Values, measures and the first step of their reductions: one program per chunk of tokens, in a fixed order."""
    code = terms.TokenCode(plan)
    body = [*CHUNK_OF_TOKENS, *code.lines(), *reduce_chunk(plan, "token")]
    inputs = ["valid", "rows", "hyper", *token_names(plan), *extra_inputs(plan)]
    scalars = ["count_rows", "chunks_token"]
    return make_kernel("partial", inputs, scalars, ["partials_token"], ["CHUNK"], body, names_of(code))


@functools.lru_cache(maxsize=256)
def results(plan: Plan, leaves: bool = False) -> Kernel:
    """The second step: every chunk's reductions → the results; one program.

    They are one vector of ``layout.scalar_count``, or with ``leaves`` buffers of their own (``layout.of_leaves``):
    where a framework would launch a copy for every scalar that it takes out of a vector.
    """
    layout = layout_of(plan)
    body = ["offsets = tl.arange(0, CHUNK)"]
    for kind in layout.kinds:
        body += _join_chunks(layout, kind)
    body.append("loss = 0.0")
    losses, metrics = [], []
    for i, planned in enumerate(plan.losses):
        body += [
            f"weight = tl.load(hyper + {planned.weight})",
            f"loss{i} = {' + '.join(f'reduced{n}' for n in layout.losses[i])}",
            f"loss = loss + tl.where(weight == 0.0, 0.0, weight * loss{i})",
        ]
        losses.append(f"loss{i}")
    for i, reported in enumerate(layout.metrics):
        body.append(f"metric{i} = {_metric(reported)}")
        metrics.append(f"metric{i}")
    if leaves:
        parts = [f"reduced{item.value}" for item in layout.metrics] + [
            f"reduced{item.weight}" for item in layout.metrics
        ]
        found = ["loss", "reduced0", *losses, *metrics, *parts]
        outputs = [f"leaf{n}" for n, _ in enumerate(found)]
        body += [f"tl.store({place}, {value})" for place, value in zip(outputs, found, strict=True)]
        assert len(found) == leaf_count(plan)
    else:
        found = ["loss", *losses, *metrics, *(f"reduced{n}" for n, _ in enumerate(layout.reductions))]
        outputs = ["scalars"]
        body += [f"tl.store(scalars + {n}, {value})" for n, value in enumerate(found)]
        assert len(found) == scalar_count(plan)
    partials = [f"partials_{kind}" for kind in layout.kinds]
    chunks = [f"chunks_{kind}" for kind in layout.kinds]
    return make_kernel("results", [*partials, "hyper"], chunks, outputs, ["CHUNK"], body, KERNEL_NAMES)


def _metric(reported: Reported) -> str:
    """A metric from its value and weight, as in ``duohead.metrics.finish``."""
    value, weight = f"reduced{reported.value}", f"reduced{reported.weight}"
    if reported.kind not in ("mean", "exp_mean"):
        return f"tl.where({weight} != 0.0, {value}, 0.0)"
    mean = f"tl.where({weight} != 0.0, {value} / tl.where({weight} != 0.0, {weight}, 1.0), 0.0)"
    return f"tl.exp({mean})" if reported.kind == "exp_mean" else mean


def _join_chunks(layout: Layout, kind: str) -> list[str]:
    """Every chunk's partial results of a kind → ``reduced0 …``, in a fixed order."""
    lines, loop = [], [f"inside = begin + offsets < chunks_{kind}"]
    for place, n in enumerate(layout.of_kind(kind)):
        op = layout.reductions[n].op
        neutral = _NEUTRAL[op]
        lines.append(f"part{n} = tl.full([CHUNK], {neutral}, tl.float32)")
        where = f"partials_{kind} + {place} * chunks_{kind} + begin + offsets"
        loop.append(f"value = tl.load({where}, mask=inside, other={neutral})")
        if op == "sum":
            loop.append(f"part{n} = part{n} + value")
        else:
            loop.append(f"part{n} = tl.{op}imum(part{n}, value, propagate_nan=tl.PropagateNan.ALL)")
    lines += [f"for begin in range(0, chunks_{kind}, CHUNK):", *indent(loop)]
    for n in layout.of_kind(kind):
        lines += _reduce(layout, n, f"part{n}")
    return lines
