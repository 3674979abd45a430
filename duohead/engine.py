"""One pass, framework-free: read → merge shards → statistics → seam → coefficients; then the write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from duohead.plan import Plan
from duohead.seam import Aux, seam
from duohead.statistics import (
    Coefficients,
    Columns,
    Inputs,
    Normalisers,
    Statistics,
    add_jsd,
    finish,
    fold,
    merge,
    read,
    read_jsd,
    write,
)

Array = Any


class Collectives(Protocol):
    """What a framework supplies where the vocabulary or the sequences are split over ranks."""

    @property
    def sequence_ranks(self) -> int:
        """Over how many ranks sequences are split."""
        ...

    def gather(self, xp: Any, rows: Array, width: int) -> tuple[Array, Array, Array]:
        """Packed rows ``[rows, *tokens]`` → (``[shards, rows, *tokens]``, starts, ends): the one collective."""

    def add(self, rows: Array) -> Array:
        """Packed rows added over the vocabulary shards (JSD's second sweep)."""

    def sum_sequences(self, rows: Array) -> Array:
        """Packed sequence sums added over the ranks that share sequences."""


class Sweeps(Protocol):
    """The reads of the vocabulary, where a kernel does them; else ``duohead.statistics`` does, as array code."""

    def read(
        self, xp: Any, plan: Plan, hyper: Sequence[Array], logits: Array, inputs: Inputs, columns: Columns
    ) -> list[Array]:
        """The partial rows ``rows_of(plan)``."""

    def read_jsd(
        self,
        xp: Any,
        plan: Plan,
        hyper: Sequence[Array],
        logits: Array,
        inputs: Inputs,
        columns: Columns,
        normalisers: Normalisers,
    ) -> list[Array]:
        """The JSD's rows."""


class Evaluation(NamedTuple):
    """The result of a pass and what its write needs."""

    loss: Array
    aux: Aux
    normalisers: Normalisers
    coefficients: Coefficients


def statistics_of(
    xp: Any,
    plan: Plan,
    hyper: Sequence[Array],
    logits: Array,
    inputs: Inputs,
    columns: Columns,
    collectives: Collectives | None = None,
    split_vocab: bool = False,
    sweeps: Sweeps | None = None,
) -> tuple[Statistics, Normalisers]:
    """The row statistics of a plan: one read, one collective where the vocabulary is split."""
    rows = (read if sweeps is None else sweeps.read)(xp, plan, hyper, logits, inputs, columns)
    if split_vocab:
        assert collectives is not None
        packed, starts, ends = collectives.gather(xp, xp.stack(rows), logits.shape[-1])
        rows = merge(xp, plan, packed, inputs.labels, starts, ends)
    statistics, normalisers = finish(xp, plan, rows, inputs, columns)
    if plan.has_jsd:
        read_second = read_jsd if sweeps is None else sweeps.read_jsd
        second = read_second(xp, plan, hyper, logits, inputs, columns, normalisers)
        if split_vocab:
            assert collectives is not None
            second = list(collectives.add(xp.stack(second)))
        add_jsd(plan, second, statistics)
    return statistics, normalisers


def evaluate(
    xp: Any,
    plan: Plan,
    hyper: Sequence[Array],
    logits: Array,
    inputs: Inputs,
    columns: Columns,
    collectives: Collectives | None = None,
    split_vocab: bool = False,
    split_sequences: bool = False,
    sweeps: Sweeps | None = None,
) -> Evaluation:
    """Everything but the write."""
    statistics, normalisers = statistics_of(xp, plan, hyper, logits, inputs, columns, collectives, split_vocab, sweeps)
    result = seam(
        xp,
        plan,
        hyper,
        statistics,
        inputs,
        collectives.sum_sequences if collectives is not None and split_sequences else None,
        collectives.sequence_ranks if collectives is not None and split_sequences else 1,
    )
    coefficients = fold(xp, plan, hyper, statistics, result.cotangents, columns)
    return Evaluation(result.loss, result.aux, normalisers, coefficients)


def gradient(
    xp: Any,
    plan: Plan,
    hyper: Sequence[Array],
    logits: Array,
    inputs: Inputs,
    columns: Columns,
    normalisers: Normalisers,
    coefficients: Coefficients,
    upstream: Array,
) -> Array:
    """The logits' gradient in the compute dtype; ``upstream`` multiplies the coefficients, not the big array."""
    scaled = scale_coefficients(coefficients, upstream)
    return write(xp, plan, hyper, logits, inputs, columns, normalisers, scaled)


def scale_coefficients(coefficients: Coefficients, factor: Array) -> Coefficients:
    """All of a row's coefficients times ``factor``; R of the JSD is a mean, not a weight."""
    return Coefficients(
        tuple((a * factor, b * factor, e * factor, u * factor) for a, b, e, u in coefficients.softmax),
        tuple((c * factor, d * factor) for c, d in coefficients.pairing),
        tuple(tuple((weight * factor, mean) for weight, mean in jsd) for jsd in coefficients.jsd),
    )


def combined_gradient(
    xp: Any, passes: Sequence[tuple[Any, ...]], logits: Array, columns: Columns, upstream: Array
) -> Array:
    """The gradients of passes ``(plan, hyper, inputs, normalisers, coefficients)``, summed in the compute dtype."""
    total = None
    for plan, hyper, inputs, normalisers, coefficients in passes:
        part = gradient(xp, plan, hyper, logits, inputs, columns, normalisers, coefficients, upstream)
        total = part if total is None else total + part
    return total


def joined(evaluations: Sequence[Evaluation]) -> tuple[Array, Aux]:
    """Total loss and aux of passes over disjoint sets of losses."""
    loss = evaluations[0].loss
    for evaluation in evaluations[1:]:
        loss = loss + evaluation.loss
    return loss, _join_aux([evaluation.aux for evaluation in evaluations])


def _join_aux(results: Sequence[Aux]) -> Aux:

    def union(dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for item in dicts:
            joined.update(item)
        return joined

    return Aux(
        union([aux.losses for aux in results]),
        union([aux.metrics for aux in results]),
        union([aux.tokens for aux in results]),
        union([aux.parts for aux in results]),
    )
