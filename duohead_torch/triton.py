"""Runs passes through the kernels: which launches a plan needs, and what is between them."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from duohead import engine
from duohead.kernels import layout, terms
from duohead.kernels.eligible import is_fused, is_sequenced, plan_fault
from duohead.plan import Plan
from duohead.seam import before, token_input
from duohead.statistics import Columns, Inputs, Normalisers
from duohead_torch import namespace
from duohead_torch.plan_key import plan_key, plan_of
from duohead_torch.triton_launch import (
    Segments,
    after_read,
    as_rows,
    fused,
    hyper_vector,
    jsd,
    make_call,
    sequence_lengths,
    sequenced,
    statistics,
    write,
)

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
    #: what a read alone stores, and what is reduced, where kernels run the terms
    read: tuple[str, ...]
    layout: layout.Layout | None


def facts_of(plan: Plan) -> Facts:
    """The facts of a plan; inside ``torch.compile`` constants of the graph, not traced."""
    if torch.compiler.is_compiling():
        return _constant_facts(plan_key(plan))  # read by attribute: not every torch can unpack such a constant
    return _facts(plan)


@functools.lru_cache(maxsize=256)
def _facts(plan: Plan) -> Facts:
    fused, sequenced = is_fused(plan), is_sequenced(plan)
    in_kernels = fused or sequenced
    read, described = (terms.read_names(plan), layout.layout_of(plan)) if in_kernels else ((), None)
    return Facts(fused, sequenced, plan_fault(plan), layout.saved_names(plan), read, described)


@torch._dynamo.assume_constant_result  # type: ignore[attr-defined,untyped-decorator]
def _constant_facts(key: str) -> Facts:
    return _facts(plan_of(key))


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
        tokens, extras = _token_inputs(job.inputs), _lengths(job) if facts.fused else {}
        over = None if facts.fused else _segments(job.inputs)
        if setting.split_vocab:
            result = after_read(call, merged_rows(job, setting, logits), tokens, over, extras)
        elif over is None:
            result = fused(call, tokens, extras, upstream, gradient, accumulate)
        else:
            result = sequenced(call, tokens, over)
        assert facts.layout is not None
        found = layout.evaluation(
            job.plan,
            facts.layout,
            layout.of_vector(job.plan, facts.layout, result.scalars.unbind()),
            result.rows,
            tuple(job.inputs.valid.shape),
            extras.get("sequence_count"),
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
def _program(function: Callable[..., Any], plan: Plan, setting: Any) -> Any:
    """A function of a job, its setting and the logits, compiled for the plan and the setting."""
    from duohead_torch.compiled import compile_program
    from duohead_torch.runner import Job

    def run(logits: torch.Tensor, hyper: tuple[torch.Tensor, ...], inputs: Any) -> Any:
        return function(Job(plan, hyper, inputs), setting, logits)

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


def merged_rows(job: Any, setting: Any, logits: torch.Tensor) -> torch.Tensor:
    """The rows of ``terms.read_names`` from every shard's read: one launch, the collective, and small array code."""
    if logits.device.type == "cuda":
        return _program(_statistics_of_shards, job.plan, setting)(logits, job.hyper, job.inputs)
    return _statistics_of_shards(job, setting, logits)


def evaluate_in_two(job: Any, setting: Any, logits: torch.Tensor) -> engine.Evaluation:
    """The read as a launch, then the seam as array code: on a GPU a compiled program."""
    if logits.device.type == "cuda" and not torch.compiler.is_compiling():
        return _program(evaluate_in_two, job.plan, setting)(logits, job.hyper, job.inputs)
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


def _lengths(job: Any) -> dict[str, torch.Tensor | None]:
    """Sequence lengths and counts, for one launch whose reductions or metrics need them."""
    plan, inputs = job.plan, job.inputs
    if not (plan.needs_segments or any("num_segments" in loss.counts for loss in plan.losses)):
        return {}
    if not torch.compiler.is_compiling():
        valid = inputs.valid.reshape(-1).contiguous()
        return dict(sequence_lengths(valid, _segments(inputs), plan.needs_segments))
    found = before(namespace, plan, job.hyper, inputs)
    lengths = None if found.lengths is None else found.lengths.reshape(-1)
    return {"lengths": lengths, "sequence_count": found.sequence_count}


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
