"""The vocabulary side: one read of the logits into row statistics, one write of the gradient.

Array code over a namespace ``xp`` (NumPy, torch or jax.numpy), on logits ``[*tokens, columns]``. A read gives partial
rows relative to the row maximum of the columns seen; partial rows of vocabulary shards merge exactly (MATH §6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from duohead.fold import FOLD_PAIRING, FOLD_SOFTMAX
from duohead.plan import Plan

Array = Any
#: ("logprob", softmax index), ("forward_kl", pairing index), ("jsd", pairing index, slot of β) → [*tokens]
Statistics = dict[tuple[Any, ...], Array]


class Columns(NamedTuple):
    """Which columns of the vocabulary these logits are: they begin at ``start``; ``size`` is the whole vocabulary's."""

    start: Any
    size: int
    padded: bool


class Inputs(NamedTuple):
    """The arrays of a call, in the order that the plan names them; absent ones are None."""

    labels: Array | None
    valid: Array
    teachers: tuple[Array, ...]
    tokens: tuple[Array, ...]
    segment_ids: Array | None
    preference_pairs: Array | None
    num_segments: int


class Normalisers(NamedTuple):
    """Row maximum and log Σ e^(x − max) of every softmax and every teacher: what the write needs to know p and q."""

    softmax: tuple[tuple[Array, Array], ...]
    teacher: tuple[tuple[Array, Array], ...]


def rows_of(plan: Plan) -> tuple[tuple[str, int], ...]:
    """The names of the partial rows of one read, in packing order."""
    rows: list[tuple[str, int]] = []
    for i, softmax in enumerate(plan.softmaxes):
        rows += [("max", i), ("sum", i)]
        if softmax.logprob:
            rows.append(("label", i))
        if softmax.entropy:
            rows.append(("weighted", i))
        if softmax.mean_logprob:
            rows += [("total", i), ("count", i)]
    for i, _ in enumerate(plan.teachers):
        rows += [("teacher_max", i), ("teacher_sum", i)]
    for i, pairing in enumerate(plan.pairings):
        if pairing.teacher_cross_entropy:
            rows.append(("teacher_cross_entropy", i))
        if pairing.forward_kl:
            rows.append(("forward_kl", i))
        if pairing.reverse_kl:
            rows.append(("reverse_kl", i))
    return tuple(rows)


def _scaled(
    xp: Any, plan: Plan, hyper: Sequence[Array], logits: Array, inputs: Inputs, columns: Columns
) -> tuple[list[Array], Array | None]:
    """The scaled, padded and masked logits of every softmax, and tanh(logit / cap) where there is a cap."""
    value = xp.cast(logits, xp.compute_dtype(logits))
    bend = None
    if plan.softcap >= 0:
        bend = xp.tanh(value / hyper[plan.softcap])
        value = bend * hyper[plan.softcap]
    scaled = [value * hyper[softmax.scale] for softmax in plan.softmaxes]
    return [_real(xp, x, inputs, columns) for x in scaled], bend


def _real(xp: Any, x: Array, inputs: Inputs, columns: Columns) -> Array:
    """Padding columns become −inf; masked rows, which may hold anything, become 0."""
    if columns.padded:
        x = xp.where(_column(xp, x, columns) < columns.size, x, -xp.inf)
    return xp.where(inputs.valid[..., None], x, 0.0)


def _column(xp: Any, x: Array, columns: Columns) -> Array:
    return xp.arange(x.shape[-1], x) + columns.start


def _teachers(
    xp: Any, plan: Plan, hyper: Sequence[Array], logits: Array, inputs: Inputs, columns: Columns
) -> list[Array]:
    dtype = xp.compute_dtype(logits)
    return [
        _real(xp, xp.cast(inputs.teachers[teacher.array], dtype) * hyper[teacher.scale], inputs, columns)
        for teacher in plan.teachers
    ]


def _is_largest(xp: Any, logits: Array, inputs: Inputs, columns: Columns) -> Array:
    """Where a row's logits are largest, before any arithmetic: contracted by a compiler, x·s − max(x·s) is not 0."""
    raw = _real(xp, xp.cast(logits, xp.compute_dtype(logits)), inputs, columns)
    # In a shard of nothing but −inf no column is a maximum to be 0 away from.
    return (raw == xp.max_last(raw)[..., None]) & (raw > -xp.inf)


def _shifted(xp: Any, x: Array) -> tuple[Array, Array, Array]:
    """(row maximum, x − maximum, e^(x − maximum)); a row of −inf is taken relative to 0."""
    top = xp.max_last(x)
    relative = x - xp.where(top == -xp.inf, 0.0, top)[..., None]
    return top, relative, xp.exp(relative)


def read(xp: Any, plan: Plan, hyper: Sequence[Array], logits: Array, inputs: Inputs, columns: Columns) -> list[Array]:
    """The partial rows ``rows_of(plan)``: the only read of the logits that any set of losses needs."""
    scaled, _ = _scaled(xp, plan, hyper, logits, inputs, columns)
    found: dict[tuple[str, int], Array] = {}
    students, teachers = [], []
    for i, x in enumerate(scaled):
        top, relative, weight = _shifted(xp, x)
        students.append((relative, weight))
        found["max", i] = top
        found["sum", i] = xp.sum_weights(weight)
        if plan.softmaxes[i].logprob:
            is_label = _column(xp, x, columns) == inputs.labels[..., None]  # type: ignore[index]
            at_label = relative
            if plan.softmaxes[i].is_top:
                at_label = xp.where(_is_largest(xp, logits, inputs, columns), 0.0, relative)
            found["label", i] = xp.sum_last(xp.where(is_label, at_label, 0.0))
        if plan.softmaxes[i].entropy:
            found["weighted", i] = xp.sum_last(xp.where(weight > 0, weight * relative, 0.0))
        if plan.softmaxes[i].mean_logprob:
            finite = relative > -xp.inf
            found["total", i] = xp.sum_last(xp.where(finite, relative, 0.0))
            found["count", i] = xp.sum_last(xp.where(finite, 1.0, xp.zeros_like(relative)))
    for i, y in enumerate(_teachers(xp, plan, hyper, logits, inputs, columns)):
        top, relative, weight = _shifted(xp, y)
        teachers.append((relative, weight))
        found["teacher_max", i] = top
        found["teacher_sum", i] = xp.sum_weights(weight)
    for i, pairing in enumerate(plan.pairings):
        x, p = students[pairing.softmax]
        y, q = teachers[pairing.teacher]
        if pairing.teacher_cross_entropy:
            found["teacher_cross_entropy", i] = xp.sum_last(xp.where(q > 0, q * x, 0.0))
        if pairing.forward_kl:
            found["forward_kl", i] = xp.sum_last(xp.where(q > 0, q * (y - x), 0.0))
        if pairing.reverse_kl:
            found["reverse_kl", i] = xp.sum_last(xp.where(p > 0, p * (x - y), 0.0))
    return [found[row] for row in rows_of(plan)]


def merge(xp: Any, plan: Plan, packed: Array, labels: Array | None, starts: Array, ends: Array) -> list[Array]:
    """The rows of the whole vocabulary from the shards' rows ``packed [shards, rows, *tokens]``.

    ``starts`` and ``ends`` ``[shards]`` say which columns each shard holds: a label's logit counts only from the
    shard that owns it.
    """
    index = {row: i for i, row in enumerate(rows_of(plan))}

    def shard(name: str, i: int) -> Array:
        return packed[:, index[name, i]]

    def shift(name: str, i: int) -> tuple[Array, Array, Array]:
        """(maximum, each shard's maximum − maximum, e^that); an empty shard moves by 0 and weighs 0."""
        tops = shard(name, i)
        top = xp.max_first(tops)
        empty = tops == -xp.inf
        moved = xp.where(empty, 0.0, tops) - xp.where(top == -xp.inf, 0.0, top)
        moved = xp.where(empty, 0.0, moved)
        return top, moved, xp.where(empty, 0.0, xp.exp(moved))

    found: dict[tuple[str, int], Array] = {}
    students, teachers = [], []
    for i, softmax in enumerate(plan.softmaxes):
        top, moved, factor = shift("max", i)
        students.append((moved, factor))
        sums = shard("sum", i)
        found["max", i] = top
        found["sum", i] = xp.sum_first(sums * factor)
        if softmax.logprob:
            shape = (starts.shape[0],) + (1,) * labels.ndim  # type: ignore[union-attr]
            owner = (starts.reshape(shape) <= labels) & (labels < ends.reshape(shape))
            found["label", i] = xp.sum_first(xp.where(owner, shard("label", i) + moved, 0.0))
        if softmax.entropy:
            found["weighted", i] = xp.sum_first(factor * (shard("weighted", i) + sums * moved))
        if softmax.mean_logprob:
            counts = shard("count", i)
            found["total", i] = xp.sum_first(shard("total", i) + counts * moved)
            found["count", i] = xp.sum_first(counts)
    for i, _ in enumerate(plan.teachers):
        top, moved, factor = shift("teacher_max", i)
        teachers.append((moved, factor))
        found["teacher_max", i] = top
        found["teacher_sum", i] = xp.sum_first(shard("teacher_sum", i) * factor)
    for i, pairing in enumerate(plan.pairings):
        x_moved, p_factor = students[pairing.softmax]
        y_moved, q_factor = teachers[pairing.teacher]
        p_sum, q_sum = shard("sum", pairing.softmax), shard("teacher_sum", pairing.teacher)
        if pairing.teacher_cross_entropy:
            rows = shard("teacher_cross_entropy", i) + q_sum * x_moved
            found["teacher_cross_entropy", i] = _weighted_sum(xp, q_factor, rows)
        if pairing.forward_kl:
            rows = shard("forward_kl", i) + q_sum * (y_moved - x_moved)
            found["forward_kl", i] = _weighted_sum(xp, q_factor, rows)
        if pairing.reverse_kl:
            rows = shard("reverse_kl", i) + p_sum * (x_moved - y_moved)
            found["reverse_kl", i] = _weighted_sum(xp, p_factor, rows)
    return [found[row] for row in rows_of(plan)]


def _weighted_sum(xp: Any, factor: Array, rows: Array) -> Array:
    return xp.sum_first(xp.where(factor > 0, factor * rows, 0.0))


def finish(
    xp: Any, plan: Plan, rows: Sequence[Array], inputs: Inputs, columns: Columns
) -> tuple[Statistics, Normalisers]:
    """Row statistics from the whole vocabulary's rows. A label past the vocabulary makes its row NaN."""
    found = dict(zip(rows_of(plan), rows, strict=True))
    bad = None
    if inputs.labels is not None:
        bad = inputs.valid & (inputs.labels >= columns.size)
    statistics: Statistics = {}
    softmaxes, teachers = [], []
    for i, softmax in enumerate(plan.softmaxes):
        top, total = found["max", i], found["sum", i]
        log_sum = xp.log(total)
        if bad is not None:
            log_sum = xp.where(bad, xp.nan, log_sum)
        softmaxes.append((xp.where(top == -xp.inf, 0.0, top), log_sum))
        statistics["lse", i] = top + log_sum
        if softmax.logprob:
            statistics["logprob", i] = found["label", i] - log_sum
            statistics["is_top", i] = xp.where(found["label", i] == 0.0, 1.0, xp.zeros_like(log_sum))
        if softmax.entropy:
            statistics["entropy", i] = log_sum - found["weighted", i] / total
        if softmax.mean_logprob:
            counts = found["count", i]
            statistics["share", i] = counts / columns.size
            statistics["mean_logprob", i] = (found["total", i] - counts * log_sum) / columns.size
    for i, _ in enumerate(plan.teachers):
        top = found["teacher_max", i]
        teachers.append((xp.where(top == -xp.inf, 0.0, top), xp.log(found["teacher_sum", i])))
    for i, pairing in enumerate(plan.pairings):
        log_p_sum, log_q_sum = softmaxes[pairing.softmax][1], teachers[pairing.teacher][1]
        p_sum, q_sum = found["sum", pairing.softmax], found["teacher_sum", pairing.teacher]
        if pairing.teacher_cross_entropy:
            statistics["teacher_cross_entropy", i] = log_p_sum - found["teacher_cross_entropy", i] / q_sum
        if pairing.forward_kl:
            statistics["forward_kl", i] = found["forward_kl", i] / q_sum - (log_q_sum - log_p_sum)
        if pairing.reverse_kl:
            statistics["reverse_kl", i] = found["reverse_kl", i] / p_sum - (log_p_sum - log_q_sum)
    return statistics, Normalisers(tuple(softmaxes), tuple(teachers))


def _log_mixture(xp: Any, beta: Array, log_q_over_p: Array) -> tuple[Array, Array]:
    """(log p/M, log q/M) with M = βq + (1 − β)p, from u = log q/p, without over- or underflow."""
    below = -xp.log((1.0 - beta) + beta * xp.exp(xp.minimum(log_q_over_p, 0.0)))
    above = -xp.log(beta + (1.0 - beta) * xp.exp(xp.minimum(-log_q_over_p, 0.0)))
    is_below = log_q_over_p <= 0
    return (
        xp.where(is_below, below, above - log_q_over_p),
        xp.where(is_below, below + log_q_over_p, above),
    )


def _log_probabilities(xp: Any, scaled: Sequence[Array], normalisers: Sequence[tuple[Array, Array]]) -> list[Array]:
    return [(x - top[..., None]) - log_sum[..., None] for x, (top, log_sum) in zip(scaled, normalisers, strict=True)]


def read_jsd(
    xp: Any,
    plan: Plan,
    hyper: Sequence[Array],
    logits: Array,
    inputs: Inputs,
    columns: Columns,
    normalisers: Normalisers,
) -> list[Array]:
    """The second sweep that JSD needs: per β of each pairing the rows (value, Σ p·log p/M); shards add them."""
    scaled, _ = _scaled(xp, plan, hyper, logits, inputs, columns)
    students = _log_probabilities(xp, scaled, normalisers.softmax)
    teachers = _log_probabilities(xp, _teachers(xp, plan, hyper, logits, inputs, columns), normalisers.teacher)
    rows = []
    for pairing in plan.pairings:
        log_p, log_q = students[pairing.softmax], teachers[pairing.teacher]
        p, q = xp.exp(log_p), xp.exp(log_q)
        for slot in pairing.jsd:
            p_over_m, q_over_m = _log_mixture(xp, hyper[slot], log_q - log_p)
            p_term = xp.where(p > 0, p * p_over_m, 0.0)
            q_term = xp.where(q > 0, q * q_over_m, 0.0)
            rows.append(xp.sum_last(hyper[slot] * q_term + (1.0 - hyper[slot]) * p_term))
            rows.append(xp.sum_last(p_term))
    return rows


def add_jsd(plan: Plan, rows: Sequence[Array], statistics: Statistics) -> None:
    """Enters the rows of ``read_jsd`` as the statistics ``jsd`` and ``jsd_mean`` (R)."""
    remaining = iter(rows)
    for i, pairing in enumerate(plan.pairings):
        for slot in pairing.jsd:
            statistics["jsd", i, slot] = next(remaining)
            statistics["jsd_mean", i, slot] = next(remaining)


class Coefficients(NamedTuple):
    """Per-row coefficients of the gradient (MATH §3), each times its softmax's scale."""

    softmax: tuple[tuple[Array, Array, Array, Array], ...]  # A, B, E, U
    pairing: tuple[tuple[Array, Array], ...]  # C, D
    jsd: tuple[tuple[tuple[Array, Array], ...], ...]  # J, R


def fold(
    xp: Any,
    plan: Plan,
    hyper: Sequence[Array],
    statistics: Statistics,
    cotangents: Mapping[tuple[Any, ...], Array],
    columns: Columns,
) -> Coefficients:
    """All cotangents, already weighted and summed over terms → the coefficients of one gradient."""
    zero = xp.zeros_like(statistics["lse", 0])

    def of(*key: Any) -> Array:
        return cotangents.get(key, zero)

    softmaxes = [
        FOLD_SOFTMAX.bound[xp.name](
            of("logprob", i),
            of("lse", i),
            of("entropy", i),
            of("mean_logprob", i),
            statistics.get(("entropy", i), zero),
            statistics.get(("share", i), zero),
            1.0 / columns.size,
        )
        for i, _ in enumerate(plan.softmaxes)
    ]
    pairings, jsd = [], []
    for i, pairing in enumerate(plan.pairings):
        a, b, c, d = FOLD_PAIRING.bound[xp.name](
            of("teacher_cross_entropy", i),
            of("forward_kl", i),
            of("reverse_kl", i),
            statistics.get(("reverse_kl", i), zero),
        )
        scale = hyper[plan.softmaxes[pairing.softmax].scale]
        old = softmaxes[pairing.softmax]
        softmaxes[pairing.softmax] = (old[0] + a, old[1] + b, old[2], old[3])
        pairings.append((c * scale, d * scale))
        jsd.append(
            tuple(
                (
                    of("jsd", i, slot) * (1.0 - hyper[slot]) * scale,
                    statistics["jsd_mean", i, slot],
                )
                for slot in pairing.jsd
            )
        )
    scaled = []
    for softmax, coefficients in zip(plan.softmaxes, softmaxes, strict=True):
        a, b, e, u = coefficients
        scale = hyper[softmax.scale]
        scaled.append((a * scale, b * scale, e * scale, u * scale))
    return Coefficients(tuple(scaled), tuple(pairings), tuple(jsd))


def write(
    xp: Any,
    plan: Plan,
    hyper: Sequence[Array],
    logits: Array,
    inputs: Inputs,
    columns: Columns,
    normalisers: Normalisers,
    coefficients: Coefficients,
) -> Array:
    """The combined gradient in the compute dtype: the only array of the logits' size that is ever made."""
    scaled, bend = _scaled(xp, plan, hyper, logits, inputs, columns)
    students = _log_probabilities(xp, scaled, normalisers.softmax)
    teachers = _log_probabilities(xp, _teachers(xp, plan, hyper, logits, inputs, columns), normalisers.teacher)
    total: Any = 0.0
    for i, softmax in enumerate(plan.softmaxes):
        a, b, e, u = (value[..., None] for value in coefficients.softmax[i])
        log_p = students[i]
        p = xp.exp(log_p)
        inner: Any = a
        if softmax.entropy or any(pair.reverse_kl and pair.softmax == i for pair in plan.pairings):
            inner = inner + b * log_p
        outside: Any = 0.0
        for j, pairing in enumerate(plan.pairings):
            if pairing.softmax != i:
                continue
            log_q = teachers[pairing.teacher]
            c, d = (value[..., None] for value in coefficients.pairing[j])
            if pairing.reverse_kl:
                inner = inner + xp.where(c == 0, 0.0, c * log_q)
            if pairing.teacher_cross_entropy or pairing.forward_kl:
                outside = outside + d * xp.exp(log_q)
            for (weight, mean), slot in zip(coefficients.jsd[j], pairing.jsd, strict=True):
                p_over_m, _ = _log_mixture(xp, hyper[slot], log_q - log_p)
                part = weight[..., None] * (p_over_m - mean[..., None])
                inner = inner + xp.where(weight[..., None] == 0, 0.0, part)
        gradient = xp.where(p == 0, 0.0, p * inner) - outside
        if softmax.mean_logprob:
            gradient = gradient - u
        if softmax.logprob:
            is_label = _column(xp, log_p, columns) == inputs.labels[..., None]  # type: ignore[index]
            gradient = gradient - xp.where(is_label, e, 0.0)
        # A column at −inf, and padding with it, gets nothing.
        total = total + xp.where(log_p == -xp.inf, 0.0, gradient)
    if bend is not None:
        total = total * (1.0 - bend * bend)
    is_real = inputs.valid[..., None]
    if columns.padded:
        # Where a row is −inf alone, or padding holds NaN and there is a cap, padding's value is NaN up to here.
        is_real = is_real & (_column(xp, total, columns) < columns.size)
    return xp.where(is_real, total, 0.0)
