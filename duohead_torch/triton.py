"""The kernels of ``duohead.kernels``, launched on torch tensors."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from duohead import engine
from duohead.kernels import layout, terms
from duohead.kernels.eligible import is_fused, is_sequenced, plan_fault
from duohead.plan import Plan
from duohead.seam import before, token_input
from duohead.statistics import Columns, Inputs, Normalisers, rows_of
from duohead_torch import namespace
from duohead_torch.plan_key import plan_key, plan_of

__all__ = ["Call", "fused", "statistics", "usable", "write"]


INSTALLED = importlib.util.find_spec("triton") is not None
#: whether kernels run in Triton's interpreter, on the CPU; Triton reads it when a kernel is made
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def usable(logits: torch.Tensor) -> str | None:
    """Why the kernels cannot run on these logits, or None."""
    if not INSTALLED:
        return "triton is not installed (pip install duohead[triton])"
    if logits.dtype == torch.float64:
        return "float64 logits: the kernel computes in float32; use 'compiled' or 'eager'"
    if logits.device.type == "cuda" or (logits.device.type == "cpu" and INTERPRETED):
        return None
    return f"logits on {logits.device}: it needs a CUDA device (or TRITON_INTERPRET=1, which runs the interpreter)"


def pick_triton(implementation: str, logits: torch.Tensor, jobs: Sequence[Any]) -> TritonRunner | None:
    """The kernels' runner; None where ``auto`` must take another.

    Raises:
        RuntimeError, ValueError: ``triton`` was asked for, and cannot run these logits or these losses.
    """
    reason = usable(logits)
    if reason is not None:
        if implementation == "triton":
            raise RuntimeError(f"implementation='triton' cannot run: {reason}")
        return None
    for job in jobs:
        fault = facts_of(job.plan).fault
        if fault is not None:
            if implementation == "triton":
                raise ValueError(f"implementation='triton' cannot take the loss {fault[0]!r}: {fault[1]}")
            return None
    return TritonRunner()


class Facts(NamedTuple):
    """What the plan alone decides: how kernels run it, what is wrong with it, and what they store."""

    #: one launch over the vocabulary
    fused: bool
    #: two, and kernels between them
    sequenced: bool
    fault: tuple[str, str] | None
    saved: tuple[str, ...]
    #: what a read alone stores, where kernels run the terms
    read: tuple[str, ...]


def facts_of(plan: Plan) -> Facts:
    """The facts of a plan; inside ``torch.compile`` constants of the graph, not traced."""
    if torch.compiler.is_compiling():
        return _constant_facts(plan_key(plan))  # read by attribute: not every torch can unpack such a constant
    return _facts(plan)


@functools.lru_cache(maxsize=256)
def _facts(plan: Plan) -> Facts:
    fused, sequenced = is_fused(plan), is_sequenced(plan)
    read = terms.read_names(plan) if fused or sequenced else ()
    return Facts(fused, sequenced, plan_fault(plan), layout.saved_names(plan), read)


@torch._dynamo.assume_constant_result  # type: ignore[attr-defined,untyped-decorator]
def _constant_facts(key: str) -> Facts:
    return _facts(plan_of(key))


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
    from duohead.kernels import build, launch

    plan, make = call.plan, call.hyper.new_empty
    count = call.logits.shape[0]
    rows = make(len(layout.layout_of(plan).stored), count)
    saved = make(len(layout.saved_names(plan)), count)
    values: dict[str, Any] = {f"token{n}": array for n, array in enumerate(tokens)}
    values |= extras
    if "valid_count" in build.extra_inputs(plan):
        values["valid_count"] = make(1)
        counting = launch.count_launch(build.count_valid())
        _start(counting, {"valid": call.valid, "count_rows": count, "valid_count": values["valid_count"]})
    kernel = build.fused(plan, _flags(call, gradient=gradient is not None, accumulate=accumulate))
    _Launcher(call, gradient).run("fused", kernel, rows=rows, saved=saved, upstream=upstream, **values)
    return Fused(reduce(call, rows, values), rows, saved)


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
    from duohead.kernels import build, launch, sequences

    plan, make, count = call.plan, call.hyper.new_empty, call.logits.shape[0]
    values: dict[str, Any] = {f"token{n}": array for n, array in enumerate(tokens)}
    values |= {
        **(extras or {}),
        "valid": call.valid,
        "hyper": call.hyper,
        "count_rows": count,
        "size": call.size,
        "rows": rows,
        "saved": make(len(layout.saved_names(plan)), count),
        "scalars": make(layout.scalar_count(plan)),
    }
    if segments is not None:
        values |= _over_sequences(call, values, segments)
    elif "valid_count" in build.extra_inputs(plan):
        values["valid_count"] = make(1)
        _start(launch.count_launch(build.count_valid()), values)
    values |= _partials(call, "token", count)
    _start(launch.item_launch(sequences.tokens(plan), count), values)
    _start(launch.results_launch(build.results(plan)), values)
    return Fused(values["scalars"], rows, values["saved"])


def _partials(call: Call, kind: str, count: int) -> dict[str, Any]:
    """Where the chunks of tokens, sequences or pairs put what they reduce."""
    from duohead.kernels import launch

    chunks = launch.items_of(count)
    rows = len(layout.layout_of(call.plan).of_kind(kind))
    return {f"chunks_{kind}": chunks, f"partials_{kind}": call.hyper.new_empty(rows, chunks)}


def _over_sequences(call: Call, given: dict[str, Any], segments: Segments) -> dict[str, Any]:
    """Sequence sums, counts, and the terms over sequences and pairs."""
    from duohead.kernels import launch, sequences

    plan, make, count, number = call.plan, call.hyper.new_empty, call.logits.shape[0], segments.number
    pairs = 0 if segments.pairs is None else segments.pairs.shape[0]
    spans = launch.spans_of(count)
    found = {
        "segment_ids": segments.ids,
        "pairs": segments.pairs,
        "span_count": spans,
        "num_segments": number,
        "count_pairs": pairs,
        "spans": torch.empty(sequences.SPAN_ROWS, spans, dtype=torch.int32, device=call.logits.device),
        "sums": make(1 + len(plan.sums), number),
        "counts": make(len(sequences.COUNTED)),
        "pair_cotangents": make(len(sequences.pair_cotangents(plan)), pairs),
        "cotangents": make(len(sequences.sum_cotangents(plan)), number),
        **_partials(call, "sequence", number),
        **_partials(call, "pair", pairs),
    }
    values = given | found
    _start(launch.span_launch(sequences.spans(), count), values)
    _start(launch.sum_launch(sequences.sums(plan), number), values)
    _start(launch.counts_launch(sequences.counts(segments.pairs is not None)), values)
    if plan.needs_pairs:
        _start(launch.item_launch(sequences.pairs(plan), pairs), values)
    _start(launch.item_launch(sequences.sequences(plan), number), values)
    return found


class TritonSweeps:
    """The engine's reads as launches: between them and the write the seam is array code."""

    def read(
        self, xp: Any, plan: Plan, hyper: Sequence[Any], logits: torch.Tensor, inputs: Inputs, columns: Columns
    ) -> list[torch.Tensor]:
        """The partial rows, in the tokens' shape."""
        rows = statistics(make_call(plan, hyper_vector(hyper), logits, inputs, columns))
        return [row.reshape(inputs.valid.shape) for row in rows.unbind()]

    def read_jsd(
        self,
        xp: Any,
        plan: Plan,
        hyper: Sequence[Any],
        logits: torch.Tensor,
        inputs: Inputs,
        columns: Columns,
        normalisers: Normalisers,
    ) -> list[torch.Tensor]:
        """The JSD's rows, in the tokens' shape."""
        pairs = [*normalisers.softmax, *normalisers.teacher]
        saved = torch.stack([array.reshape(-1) for pair in pairs for array in pair])
        rows = jsd(make_call(plan, hyper_vector(hyper), logits, inputs, columns), saved)
        return [row.reshape(inputs.valid.shape) for row in rows.unbind()]


class Saved(NamedTuple):
    """In the place of an Evaluation's coefficients: the rows that the write kernel reads."""

    hyper: torch.Tensor
    rows: torch.Tensor


class TritonRunner:
    """Runs a pass through the kernels: one launch where every term is per token, else two with the rest between."""

    name = "triton"

    def evaluate(self, jobs: Any, setting: Any, logits: torch.Tensor) -> list[engine.Evaluation]:
        """Everything but the gradient: one read of the logits, nothing of their size written."""
        return [self._evaluate(job, setting, logits, None, None, False) for job in jobs]

    def gives_gradient(self, jobs: Any, setting: Any) -> bool:
        """Whether the gradient costs no second read: then it is best written in the forward.

        Not inside a user's ``torch.compile``: a backward graph cannot hand over a buffer that the forward's made.
        """
        return not torch.compiler.is_compiling() and len(jobs) == 1 and self._is_fused(jobs[0], setting)

    def evaluate_with_gradient(
        self,
        jobs: Any,
        setting: Any,
        logits: torch.Tensor,
        upstream: torch.Tensor,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> tuple[list[engine.Evaluation], torch.Tensor]:
        """The evaluation and the gradient times ``upstream``, where one launch does both (``gives_gradient``)."""
        (job,) = jobs
        target, rows = _target(logits, out, accumulate)
        found = [self._evaluate(job, setting, logits, upstream, rows, accumulate)]
        return found, _finish(target, rows, out)

    def _is_fused(self, job: Any, setting: Any) -> bool:
        return facts_of(job.plan).fused and not setting.split_vocab and not setting.split_sequences

    def _evaluate(
        self,
        job: Any,
        setting: Any,
        logits: torch.Tensor,
        upstream: torch.Tensor | None,
        gradient: torch.Tensor | None,
        accumulate: bool,
    ) -> engine.Evaluation:
        facts = facts_of(job.plan)
        traced_shards = setting.split_vocab and torch.compiler.is_compiling()
        if setting.split_sequences or traced_shards or not (facts.fused or facts.sequenced):
            return evaluate_in_two(job, setting, logits)
        call = make_call(job.plan, hyper_vector(job.hyper), logits, job.inputs, setting.columns)
        segments = None
        if facts.fused:
            tokens, extras, segments = _beforehand(job)
        else:
            tokens, extras = _token_inputs(job.inputs), {}
        over = None if facts.fused else _segments(job.inputs)
        if setting.split_vocab:
            result = after_read(call, merged_rows(job, setting, logits), tokens, over, extras)
        elif over is None:
            result = fused(call, tokens, extras, upstream, gradient, accumulate)
        else:
            result = sequenced(call, tokens, over)
        found = layout.evaluation(
            namespace,
            job.plan,
            layout.of_vector(job.plan, result.scalars.unbind()),
            result.rows,
            tuple(job.inputs.valid.shape),
            segments,
        )
        return found._replace(coefficients=Saved(call.hyper, result.saved))  # type: ignore[arg-type]

    def gradient(
        self,
        written: Any,
        setting: Any,
        logits: torch.Tensor,
        upstream: torch.Tensor,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> torch.Tensor:
        """The gradient in the logits' dtype, rounded once; ``out`` takes (or adds) it in place."""
        target, rows = _target(logits, out, accumulate)
        for n, item in enumerate(written):
            call = make_call(item.job.plan, item.coefficients.hyper, logits, item.job.inputs, setting.columns)
            write(call, item.coefficients.rows, _scalar(upstream), rows, accumulate or n > 0)
        return _finish(target, rows, out)

    def rescale(
        self, written: Any, setting: Any, logits: torch.Tensor, upstream: torch.Tensor, buffer: torch.Tensor
    ) -> torch.Tensor:
        """The forward's gradient times upstream: written anew from the logits, unless upstream is 1 on the device."""
        (item,) = written
        call = make_call(item.job.plan, item.coefficients.hyper, logits, item.job.inputs, setting.columns)
        write(call, item.coefficients.rows, _scalar(upstream), as_rows(buffer), check=True)
        return buffer


def _scalar(upstream: torch.Tensor) -> torch.Tensor:
    return upstream if upstream.dtype == torch.float32 else upstream.to(torch.float32)


@functools.lru_cache(maxsize=256)
def _two_program(plan: Plan, setting: Any) -> Any:
    from duohead_torch.compiled import compile_program
    from duohead_torch.runner import Job

    def run(logits: torch.Tensor, hyper: tuple[torch.Tensor, ...], inputs: Any) -> engine.Evaluation:
        return evaluate_in_two(Job(plan, hyper, inputs), setting, logits)

    return compile_program(run)


def _statistics_of_shards(job: Any, setting: Any, logits: torch.Tensor) -> torch.Tensor:
    statistics, normalisers = engine.statistics_of(
        namespace,
        job.plan,
        job.hyper,
        logits,
        job.inputs,
        setting.columns,
        setting.collectives,
        True,
        TritonSweeps(),
    )
    rows = terms.read_rows(facts_of(job.plan).read, job.plan, statistics, normalisers)
    return torch.stack([torch.where(job.inputs.valid, row, 0.0).reshape(-1) for row in rows])


@functools.lru_cache(maxsize=256)
def _shards_program(plan: Plan, setting: Any) -> Any:
    from duohead_torch.compiled import compile_program
    from duohead_torch.runner import Job

    def run(logits: torch.Tensor, hyper: tuple[torch.Tensor, ...], inputs: Any) -> torch.Tensor:
        return _statistics_of_shards(Job(plan, hyper, inputs), setting, logits)

    return compile_program(run)


def merged_rows(job: Any, setting: Any, logits: torch.Tensor) -> torch.Tensor:
    """The rows of ``terms.read_names`` from every shard's read: one launch, the collective, and small array code."""
    if logits.device.type == "cuda":
        return _shards_program(job.plan, setting)(logits, job.hyper, job.inputs)
    return _statistics_of_shards(job, setting, logits)


def evaluate_in_two(job: Any, setting: Any, logits: torch.Tensor) -> engine.Evaluation:
    """The read as a launch, then the seam as array code: on a GPU a compiled program."""
    if logits.device.type == "cuda" and not torch.compiler.is_compiling():
        return _two_program(job.plan, setting)(logits, job.hyper, job.inputs)
    found = engine.evaluate(
        namespace,
        job.plan,
        job.hyper,
        logits,
        job.inputs,
        setting.columns,
        setting.collectives,
        setting.split_vocab,
        setting.split_sequences,
        TritonSweeps(),
    )
    rows = layout.saved_rows(facts_of(job.plan).saved, found.normalisers, found.coefficients)
    zero = torch.zeros_like(found.normalisers.softmax[0][0])
    saved = torch.stack([(row + zero).reshape(-1) for row in rows])
    # Not _replace: torch 2.11 cannot return what that makes from a compiled program.
    kept = Saved(hyper_vector(job.hyper), saved)
    return engine.Evaluation(found.loss, found.aux, (), kept)  # type: ignore[arg-type]


def _token_inputs(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Token inputs as vectors; one per segment is carried by the segment's tokens."""
    shape = inputs.valid.shape
    carried = [
        array if array.shape == shape else token_input(namespace, array, inputs, torch.float32)
        for array in inputs.tokens
    ]
    return tuple(array.reshape(-1).contiguous() for array in carried)


def _segments(inputs: Inputs) -> Segments:
    ids, pairs = inputs.segment_ids, inputs.preference_pairs
    assert ids is not None
    return Segments(ids.reshape(-1).contiguous(), None if pairs is None else pairs.contiguous(), inputs.num_segments)


def _beforehand(job: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor | None], torch.Tensor | None]:
    """Token inputs as vectors; sequence lengths and counts where a reduction or a metric needs them."""
    plan, inputs = job.plan, job.inputs
    per_segment = any(array.shape != inputs.valid.shape for array in inputs.tokens)
    counted = any("num_segments" in loss.counts for loss in plan.losses)
    if not (per_segment or plan.needs_segments or counted):
        return tuple(array.reshape(-1).contiguous() for array in inputs.tokens), {}, None
    found = before(namespace, plan, job.hyper, inputs)
    tokens = tuple(array.reshape(-1).contiguous() for array in found.tokens)
    lengths = None if found.lengths is None else found.lengths.reshape(-1)
    return tokens, {"lengths": lengths, "sequence_count": found.sequence_count}, found.num_segments


def _target(logits: torch.Tensor, out: torch.Tensor | None, accumulate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(the gradient's tensor, its rows): ``out`` itself where its rows can be viewed."""
    if out is None:
        target = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        return target, as_rows(target)
    rows = as_rows(out)
    return (out, rows)


def _finish(target: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Copies the rows back where they could not be a view of ``out``."""
    if out is not None and rows.numel() and rows.data_ptr() != out.data_ptr():
        out.copy_(rows.view(out.shape))
    return target


from duohead_torch import triton_ops  # noqa: E402, F401  (registers the operators)
