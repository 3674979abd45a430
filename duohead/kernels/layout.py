"""What the kernels of a plan store, in which order: shared by the kernels and by the array code beside them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from duohead.engine import Evaluation
from duohead.kernels.eligible import is_fused
from duohead.loss import Output
from duohead.metrics import KINDS, Total
from duohead.plan import Operand, Pairing, Plan
from duohead.seam import Aux
from duohead.statistics import Coefficients, Normalisers

Array = Any


def uses_entropy_slope(plan: Plan, i: int) -> bool:
    """Whether the gradient of softmax ``i`` has the coefficient B (of p·log p)."""
    return plan.softmaxes[i].entropy or any(pair.reverse_kl and pair.softmax == i for pair in plan.pairings)


def uses_teacher_mass(pairing: Pairing) -> bool:
    """Whether the gradient of a pairing has the coefficient D (of q)."""
    return pairing.teacher_cross_entropy or pairing.forward_kl


@functools.lru_cache(maxsize=256)
def saved_names(plan: Plan) -> tuple[str, ...]:
    """The rows that the write needs: normalisers first, then the coefficients that the plan can make non-zero."""
    names: list[str] = []
    for i, _ in enumerate(plan.softmaxes):
        names += [f"top{i}", f"log_sum{i}"]
    for k, _ in enumerate(plan.teachers):
        names += [f"teacher_top{k}", f"teacher_log_sum{k}"]
    for i, softmax in enumerate(plan.softmaxes):
        names.append(f"A{i}")
        names += [f"B{i}"] if uses_entropy_slope(plan, i) else []
        names += [f"E{i}"] if softmax.logprob else []
        names += [f"U{i}"] if softmax.mean_logprob else []
    for j, pairing in enumerate(plan.pairings):
        names += [f"C{j}"] if pairing.reverse_kl else []
        names += [f"D{j}"] if uses_teacher_mass(pairing) else []
        for b, _ in enumerate(pairing.jsd):
            names += [f"J{j}_{b}", f"R{j}_{b}"]
    return tuple(names)


def saved_rows(names: Sequence[str], normalisers: Normalisers, coefficients: Coefficients) -> list[Array]:
    """The arrays of these ``saved_names``, from what the array code between two launches computes."""
    found: dict[str, Array] = {}
    for i, (top, log_sum) in enumerate(normalisers.softmax):
        found[f"top{i}"], found[f"log_sum{i}"] = top, log_sum
    for k, (top, log_sum) in enumerate(normalisers.teacher):
        found[f"teacher_top{k}"], found[f"teacher_log_sum{k}"] = top, log_sum
    for i, (a, b, e, u) in enumerate(coefficients.softmax):
        found |= {f"A{i}": a, f"B{i}": b, f"E{i}": e, f"U{i}": u}
    for j, (c, d) in enumerate(coefficients.pairing):
        found |= {f"C{j}": c, f"D{j}": d}
        for b, (weight, mean) in enumerate(coefficients.jsd[j]):
            found |= {f"J{j}_{b}": weight, f"R{j}_{b}": mean}
    return [found[name] for name in names]


class Reduction(NamedTuple):
    """One reduction: ``op`` sum, min or max of a row over the tokens, sequences or pairs; row −1 counts them."""

    row: int
    op: str
    kind: str = "token"


#: what rows are over
KINDS_OF_ROWS = ("token", "sequence", "pair")


class Reported(NamedTuple):
    """One metric: the reductions of its value and its weight."""

    name: str
    kind: str
    value: int
    weight: int


class Layout(NamedTuple):
    """The statistics that the kernels store per token, and what the reductions make of them.

    ``stored`` are keys of statistics. ``rows``, what is reduced, are keys ``("loss", l, kind)``,
    ``("output", l, measurement, output)``, ``("product", …)`` or ``("statistic", name, softmax)``. ``losses`` are the
    reductions whose sum each loss is.
    """

    stored: tuple[tuple[Any, ...], ...]
    rows: tuple[tuple[Any, ...], ...]
    reductions: tuple[Reduction, ...]
    losses: tuple[tuple[int, ...], ...]
    metrics: tuple[Reported, ...]
    tokens: tuple[tuple[str, int], ...]

    def of_kind(self, kind: str) -> list[int]:
        """The reductions over one kind, in the order of their partial results."""
        return [n for n, reduction in enumerate(self.reductions) if reduction.kind == kind]

    @property
    def kinds(self) -> list[str]:
        """The kinds that are reduced over."""
        return [kind for kind in KINDS_OF_ROWS if self.of_kind(kind)]


class _Collector:
    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.reductions: list[Reduction] = [Reduction(-1, "sum")]  # the valid tokens

    def row(self, key: tuple[Any, ...]) -> int:
        if key not in self.rows:
            self.rows.append(key)
        return self.rows.index(key)

    def reduce(self, key: tuple[Any, ...], op: str, kind: str = "token") -> int:
        return self._index(Reduction(self.row(key), op, kind))

    def count(self, kind: str) -> int:
        return self._index(Reduction(-1, "sum", kind))

    def _index(self, wanted: Reduction) -> int:
        if wanted not in self.reductions:
            self.reductions.append(wanted)
        return self.reductions.index(wanted)


_HEAD = {
    "entropy": ("entropy", "mean"),
    "accuracy": ("is_top", "mean"),
    "mean_logprob": ("logprob", "mean"),
    "perplexity": ("negative_logprob", "exp_mean"),
}
_TOKENS = {"logprobs": "logprob", "entropy": "entropy", "lse": "lse"}


@functools.lru_cache(maxsize=256)
def layout_of(plan: Plan) -> Layout:
    """The rows and reductions of a plan whose terms all run in kernels; reduction 0 counts the valid tokens."""
    found = _Collector()
    losses = tuple(
        tuple(found.reduce(("loss", i, kind), "sum", kind) for kind in dict.fromkeys(part.kind for part in loss.parts))
        for i, loss in enumerate(plan.losses)
    )
    metrics: list[Reported] = []
    sequences = found.count("sequence") if plan.needs_segments and not is_fused(plan) else -1
    for i, loss in enumerate(plan.losses):
        for m, measurement in enumerate(loss.measurements):
            for o, output in enumerate(measurement.outputs):
                if output.metrics:
                    metrics += _reported(found, loss.name, measurement.kind, output, (i, m, o))
        if "num_tokens" in loss.counts:
            metrics.append(Reported(f"{loss.name}/num_tokens", "sum", 0, 0))
        if "num_segments" in loss.counts and sequences >= 0:
            metrics.append(Reported(f"{loss.name}/num_segments", "sum", sequences, 0))
    for name in plan.head_metrics:
        if name == "num_tokens":
            metrics.append(Reported("head/num_tokens", "sum", 0, 0))
        else:
            statistic, kind = _HEAD[name]
            value = found.reduce(("statistic", statistic, plan.head), "sum")
            metrics.append(Reported(f"head/{name}", kind, value, 0))
    stored = stored_statistics(plan)
    tokens = tuple((name, stored.index((_TOKENS[name], plan.head))) for name in plan.tokens)
    return Layout(stored, tuple(found.rows), tuple(found.reductions), losses, tuple(metrics), tokens)


def _reported(found: _Collector, loss: str, kind: str, output: Output, place: tuple[int, int, int]) -> list[Reported]:
    """The metrics of one output of a measure over tokens, sequences or pairs."""
    weighted = output.weight >= 0
    weight = found.reduce(("output", *place[:2], output.weight), "sum", kind) if weighted else found.count(kind)
    metrics = []
    for name, how in output.metrics:
        op = how if how in ("min", "max") else "sum"
        key = ("product" if weighted and op == "sum" else "output", *place)
        metrics.append(Reported(f"{loss}/{name}", how, found.reduce(key, op, kind), weight))
    return metrics


def stored_statistics(plan: Plan) -> tuple[tuple[Any, ...], ...]:
    """The keys of the statistics that values, measures, sequence sums, metrics and token outputs need."""
    given = [part.operands for loss in plan.losses for part in loss.parts]
    given += [measurement.operands for loss in plan.losses for measurement in loss.measurements]
    given += [(wanted.base,) if wanted.minus is None else (wanted.base, wanted.minus) for wanted in plan.sums]
    operands = [operand for some in given for operand in some if operand.source == "statistic"]
    head = [_HEAD[name][0].removeprefix("negative_") for name in plan.head_metrics if name != "num_tokens"]
    head += [_TOKENS[name] for name in plan.tokens]
    keys = [*(statistic_key(operand) for operand in operands), *((name, plan.head) for name in head)]
    return tuple(dict.fromkeys(keys))


def scalar_count(plan: Plan) -> int:
    """The length of the vector of results: loss, losses, metrics, then the reductions themselves."""
    layout = layout_of(plan)
    return 1 + len(plan.losses) + len(layout.metrics) + len(layout.reductions)


class Scalars(NamedTuple):
    """The results as scalars; ``parts`` are each metric's value and weight."""

    loss: Array
    losses: Sequence[Array]
    metrics: Sequence[Array]
    parts: Sequence[tuple[Array, Array]]
    num_tokens: Array


def of_vector(plan: Plan, layout: Layout, results: Sequence[Array]) -> Scalars:
    """The scalars of a vector of ``scalar_count`` results."""
    first_metric = 1 + len(plan.losses)
    reduced = results[first_metric + len(layout.metrics) :]
    return Scalars(
        results[0],
        results[1:first_metric],
        results[first_metric : first_metric + len(layout.metrics)],
        [(reduced[item.value], reduced[item.weight]) for item in layout.metrics],
        reduced[0],
    )


def leaf_count(plan: Plan) -> int:
    """How many scalars the results are where each has a buffer of its own, those that are equal too."""
    return 2 + len(plan.losses) + 3 * len(layout_of(plan).metrics)


def of_leaves(plan: Plan, layout: Layout, leaves: Sequence[Array]) -> Scalars:
    """The scalars of ``leaf_count`` buffers: loss, number of tokens, losses, metrics, values, weights."""
    losses, metrics = len(plan.losses), len(layout.metrics)
    first_metric = 2 + losses
    values = first_metric + metrics
    weights = values + metrics
    return Scalars(
        leaves[0],
        leaves[2:first_metric],
        leaves[first_metric:values],
        list(zip(leaves[values:weights], leaves[weights:], strict=True)),
        leaves[1],
    )


def evaluation(
    plan: Plan,
    layout: Layout,
    scalars: Scalars,
    rows: Array,
    shape: tuple[int, ...],
    num_segments: Array | None,
) -> Evaluation:
    """The kernels' results as an Evaluation; ``rows [rows, T]`` are the stored statistics."""
    losses = {loss.name: value for loss, value in zip(plan.losses, scalars.losses, strict=True)}
    values = {item.name: value for item, value in zip(layout.metrics, scalars.metrics, strict=True)}
    parts: dict[str, Any] = {
        item.name: KINDS[item.kind](*part) for item, part in zip(layout.metrics, scalars.parts, strict=True)
    }
    for loss in plan.losses:
        if "num_segments" in loss.counts and num_segments is not None:
            name = f"{loss.name}/num_segments"
            parts[name] = Total(num_segments, scalars.num_tokens)
            values[name] = num_segments  # 0 where no token is valid, as it is
    tokens = {name: rows[row].reshape(shape) for name, row in layout.tokens}
    metrics = {name: values[name] for name in parts}
    return Evaluation(scalars.loss, Aux(losses, metrics, tokens, parts), (), ())  # type: ignore[arg-type]


def statistic_key(operand: Operand) -> tuple[Any, ...]:
    """The key of a statistic operand: its name, and the index of its softmax or pairing (and β for the JSD)."""
    if operand.name == "jsd":
        return ("jsd", operand.index, operand.beta)
    return (operand.name, operand.index)
