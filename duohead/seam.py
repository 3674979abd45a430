"""Between the read and the write: terms, reductions, sequence sums and metrics, as array code on ``[tokens]``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from duohead.loss import Output
from duohead.metrics import KINDS, finish
from duohead.plan import Operand, Plan, PlannedLoss, PlannedMeasurement, PlannedPart
from duohead.reductions import item_weight, sequence_weights, token_weights
from duohead.row_reductions import Reduced, RowReductions
from duohead.statistics import Inputs, Statistics

Array = Any
Collective = Callable[[Array], Array]


class Aux(NamedTuple):
    """What a call reports beside its loss; all of it detached.

    ``losses``: name → unweighted reduced value. ``metrics``: ``"name/metric"`` → value. ``tokens``: ``logprobs``,
    ``entropy``, ``lse`` per token where asked for. ``parts``: the metrics' (value, weight) parts, which
    ``duohead.metrics.combine`` joins over micro-batches and ranks exactly.
    """

    losses: dict[str, Array]
    metrics: dict[str, Array]
    tokens: dict[str, Array]
    parts: dict[str, Any]


class Seam(NamedTuple):
    """The result of the seam: the total, what is reported, and d total / d statistic per token."""

    loss: Array
    aux: Aux
    cotangents: dict[tuple[Any, ...], Array]


def seam(
    xp: Any,
    plan: Plan,
    hyper: Sequence[Array],
    statistics: Statistics,
    inputs: Inputs,
    sum_sequences: Collective | None = None,
    sequence_ranks: int = 1,
) -> Seam:
    """Evaluates every loss and metric of the plan from the row statistics.

    ``sum_sequences`` adds the packed sequence sums over the ranks that share sequences; then each of the
    ``sequence_ranks`` ranks reports its share, so that the ranks' losses add up to the whole.
    """
    return _Seam(xp, plan, hyper, statistics, inputs, sum_sequences, sequence_ranks).run()


def token_input(xp: Any, array: Array, inputs: Inputs, dtype: Any) -> Array:
    """A per-token input; one per segment is carried by the segment's tokens."""
    array = xp.cast(array, dtype)
    if tuple(array.shape) == tuple(inputs.valid.shape):
        return array
    ids: Any = inputs.segment_ids
    inside = (ids >= 0) & (ids < array.shape[0])
    carried = xp.take(array, xp.where(inside, ids, 0))
    return xp.where(inside, carried, xp.where(ids < 0, 0.0, xp.nan))


class Before(NamedTuple):
    """What a launch that evaluates the terms itself needs to know of the sequences beforehand."""

    lengths: Array | None
    sequence_count: Array


def before(xp: Any, plan: Plan, hyper: Sequence[Array], inputs: Inputs) -> Before:
    """The number of sequences and, where a reduction needs them, the lengths of the tokens' sequences."""
    seam = _Seam(xp, plan, hyper, {}, inputs, None, 1)
    return Before(seam._carry(seam.lengths) if plan.needs_segments else None, seam._segments_here())


class _Pending(NamedTuple):
    """A metric whose value and weight are still to be reduced, or are scalars already."""

    kind: str
    value: Reduced | Array
    weight: Reduced | Array
    share: float


class _Seam:
    def __init__(
        self,
        xp: Any,
        plan: Plan,
        hyper: Sequence[Array],
        statistics: Statistics,
        inputs: Inputs,
        sum_sequences: Collective | None,
        sequence_ranks: int,
    ) -> None:
        self.xp, self.plan, self.hyper = xp, plan, hyper
        self.statistics, self.inputs = statistics, inputs
        self.share = 1.0 / sequence_ranks
        self.cotangents: dict[tuple[Any, ...], Array] = {}
        self.reductions = RowReductions(xp)
        self.pending: dict[str, _Pending] = {}
        like = statistics["lse", 0] if statistics else hyper[0]
        self.like = like
        self.valid = inputs.valid
        self.counted = xp.where(self.valid, xp.ones_like(like), 0.0)
        self.num_valid = xp.sum_all(self.counted)
        self.tokens = [xp.where(self.valid, token_input(xp, array, inputs, like.dtype), 0.0) for array in inputs.tokens]
        self._sequences(sum_sequences)
        self._counts()

    def _sequences(self, sum_sequences: Collective | None) -> None:
        """All sequence sums, packed: row 0 the lengths, then ``plan.sums``; one collective if sequences are split."""
        xp, plan, inputs = self.xp, self.plan, self.inputs
        self.num_tokens, self.num_segments = self.num_valid, inputs.num_segments
        counts_segments = any("num_segments" in loss.counts for loss in plan.losses)
        self.has_lengths = plan.needs_segments or (counts_segments and sum_sequences is not None)
        if not self.has_lengths:
            if sum_sequences is not None and plan.num_tokens < 0:
                # The mean is over the whole's tokens, so that the ranks' losses add up.
                self.num_tokens = sum_sequences(self.num_valid.reshape(1))[0]
            return
        ids = inputs.segment_ids
        self.in_sequence = self.valid & (ids >= 0)  # type: ignore[operator]
        known = self.in_sequence & (ids < self.num_segments)  # type: ignore[operator]
        self.ids = xp.where(known, ids, self.num_segments)
        rows = [xp.where(known, self.counted, 0.0)]
        for wanted in plan.sums:
            value = self._token_value(wanted.base)
            if wanted.minus is not None:
                value = value - self._token_value(wanted.minus)
            rows.append(xp.where(known, value, 0.0))
        # An id past the segments, like a label past the vocabulary, shows: it makes every sequence loss NaN.
        lost = xp.sum_all(xp.where(self.in_sequence & ~known, 1.0, xp.zeros_like(self.counted)))
        poison = xp.where(lost > 0, xp.nan, xp.zeros_like(lost))
        flat = xp.stack([row.reshape(-1) for row in rows])
        sums = xp.segment_sum(flat, self.ids.reshape(-1), self.num_segments + 1)[:, :-1] + poison
        if sum_sequences is not None:
            # The number of valid tokens travels in the same collective.
            extra = xp.zeros_like(sums[:, :1]) + self.num_valid
            packed = sum_sequences(xp.concatenate([sums, extra]))
            sums, self.num_tokens = packed[:, :-1], packed[0, -1]
        self.lengths = sums[0]
        self.sums = [sums[i] for i in range(len(rows))]
        self.num_sequences = xp.sum_all(xp.where(self.lengths > 0, xp.ones_like(self.lengths), self.lengths))

    def _counts(self) -> None:
        """Given counts are the global batch's and replace those counted here."""
        xp, plan, hyper = self.xp, self.plan, self.hyper
        # Without a single valid token nothing exists, not even the constant of an empty pair.
        some = self.num_tokens != 0
        if plan.num_tokens >= 0:
            self.num_tokens = hyper[plan.num_tokens]
        self.sequence_count = None
        if plan.needs_segments:
            self.sequence_count = self.num_sequences
        if plan.num_sequences >= 0:
            self.sequence_count = hyper[plan.num_sequences]
        if plan.needs_pairs:
            pairs = self.inputs.preference_pairs
            assert pairs is not None
            self.sides = {"chosen": pairs[:, 0], "rejected": pairs[:, 1]}
            self.real_pair = (pairs[:, 0] >= 0) & (pairs[:, 1] >= 0) & some
            # A pair that names a segment past the last one shows as NaN.
            wrong = self.real_pair & ((pairs[:, 0] >= self.num_segments) | (pairs[:, 1] >= self.num_segments))
            one = xp.zeros_like(self.lengths[:1]) + 1.0
            self.pair_value = xp.where(wrong, xp.nan, one)
            self.counted_pairs = xp.where(self.real_pair, one, 0.0)
            self.num_pairs = xp.sum_all(self.counted_pairs)
            self.pair_count = hyper[plan.num_pairs] if plan.num_pairs >= 0 else self.num_pairs

    # --- operands -------------------------------------------------------------------------------------------------

    def _token_value(self, operand: Operand) -> Array:
        if operand.source == "input":
            return self.tokens[operand.index]
        return self.statistics[_key(operand)]

    def _sequence_value(self, operand: Operand) -> Array:
        total = self.sums[operand.index]
        if operand.name == "mean":
            return total / self.xp.where(self.lengths > 0, self.lengths, 1.0)
        return total

    def _value(self, operand: Operand) -> Any:
        xp = self.xp
        if operand.source == "hyper":
            return self.hyper[operand.index]
        if operand.source == "one":
            return 1.0
        if operand.source in ("statistic", "input"):
            return self._token_value(operand)
        value = self._sequence_value(operand)
        if operand.source == "sequence":
            return value
        if operand.source == "carried":
            return self._carry(value)
        ids = self.sides[operand.source]
        inside = self.real_pair & (ids < self.num_segments)
        return xp.take(value, xp.where(inside, ids, 0))

    def _carry(self, value: Array) -> Array:
        """A sequence's value at each of its tokens; 0 at tokens of no sequence."""
        xp = self.xp
        inside = self.ids < self.num_segments
        return xp.where(inside, xp.take(value, xp.where(inside, self.ids, 0)), 0.0)

    # --- losses ---------------------------------------------------------------------------------------------------

    def run(self) -> Seam:
        xp, plan = self.xp, self.plan
        entered = [[(self._part(loss, part), self._share(part.kind)) for part in loss.parts] for loss in plan.losses]
        self._metrics()
        self.reductions.run()
        total: Any = xp.zeros_like(self.num_valid)
        losses = {}
        for loss, reduced in zip(plan.losses, entered, strict=True):
            value = xp.zeros_like(self.num_valid)
            for where, share in reduced:
                value = value + self.reductions.value(where) * share
            losses[loss.name] = value
            weight = self.hyper[loss.weight]
            total = total + xp.where(weight == 0, 0.0, weight * value)
        parts = {name: self._finished(pending) for name, pending in self.pending.items()}
        metrics = {name: finish(xp, part) for name, part in parts.items()}
        return Seam(total, Aux(losses, metrics, self._token_outputs(), parts), self.cotangents)

    def _part(self, loss: PlannedLoss, part: PlannedPart) -> Reduced:
        """Evaluates one term, enters its weighted cotangents and its values for the reduction."""
        xp = self.xp
        arguments = [self._value(operand) for operand in part.operands]
        value, derivatives = self._evaluate(part, arguments)
        weight, counted = self._weights(loss, part.kind)
        counted = counted & (weight != 0)  # NaN counts
        factor = self.hyper[loss.weight]
        for operand, derivative in zip(part.differentiable, derivatives, strict=True):
            # where, not a product: a loss or a token of weight 0 or a masked row adds exactly nothing.
            cotangent = xp.where(counted & (factor != 0), factor * weight * derivative, 0.0)
            self._enter(operand, cotangent)
        product = xp.where(counted, weight * value, 0.0)
        return self._reduce("sum", part.kind, product)

    def _reduce(self, operation: str, kind: str, vector: Array) -> Reduced:
        """Enters a vector over tokens, sequences or pairs for a reduction."""
        over = self.counted
        if kind != "token":
            over = self.counted_pairs if kind == "pair" else self.lengths
        # One shape and dtype for all rows of a stack; a NaN of a length stays its own sequence's.
        vector = self.xp.cast(vector, self.like.dtype) + self.xp.zeros_like(over)
        return self.reductions.add(operation, kind, vector)

    def _share(self, kind: str) -> float:
        """What of a reduction is this rank's: sequences and pairs are the same on all ranks that share them."""
        return 1.0 if kind == "token" else self.share

    def _evaluate(self, part: PlannedPart, arguments: list[Any]) -> tuple[Array, tuple[Array, ...]]:
        function = part.term.bound[self.xp.term_names(self.like)]
        if part.term.has_derivatives:
            result = function(*arguments)
            return result[0], tuple(result[1:])
        positions = [i for i, operand in enumerate(part.operands) if operand in part.differentiable]
        return self.xp.value_and_derivatives(function, arguments, positions)

    def _weights(self, loss: PlannedLoss, kind: str) -> tuple[Array, Array]:
        """(weight, which elements count) of a loss's tokens, sequences or pairs."""
        xp = self.xp
        denominator = self.hyper[loss.denominator] if loss.denominator >= 0 else None
        if kind == "pair":
            weight = item_weight(xp, loss.reduction, count=self.pair_count, denominator=denominator)
            return weight * self.pair_value, self.real_pair
        if kind == "sequence" and not loss.carried_by_tokens:
            weight = item_weight(xp, loss.reduction, count=self.sequence_count, denominator=denominator)
            return weight, self.lengths != 0
        if kind == "sequence":
            weight = sequence_weights(
                xp,
                loss.reduction,
                num_tokens=self.num_tokens,
                num_sequences=self.sequence_count,
                denominator=denominator,
                lengths=self.lengths,
            )
            return weight, self.lengths != 0
        length = self._carry(self.lengths) if loss.reduction.startswith("sequence_") else None
        weight = token_weights(
            xp,
            loss.reduction,
            num_tokens=self.num_tokens,
            num_sequences=self.sequence_count,
            denominator=denominator,
            length=length,
        )
        return weight, self.valid

    def _enter(self, operand: Operand, cotangent: Array) -> None:
        """Adds d total / d operand to the statistics that the operand is made of."""
        xp = self.xp
        if operand.source == "statistic":
            self._add(_key(operand), cotangent)
            return
        if operand.index == 0:
            return  # the length has no derivative
        if operand.source in ("chosen", "rejected"):
            ids = xp.where(self.real_pair, self.sides[operand.source], self.num_segments)
            ids = xp.where(ids < self.num_segments, ids, self.num_segments)
            cotangent = xp.segment_sum(cotangent[None], ids, self.num_segments + 1)[0, :-1]
        if operand.name == "mean":
            cotangent = cotangent / xp.where(self.lengths > 0, self.lengths, 1.0)
        base = self.plan.sums[operand.index - 1].base
        if base.source == "statistic":
            self._add(_key(base), xp.where(self.valid, self._carry(cotangent), 0.0))

    def _add(self, key: tuple[Any, ...], cotangent: Array) -> None:
        cotangent = self.xp.cast(cotangent, self.like.dtype) + self.xp.zeros_like(self.like)
        self.cotangents[key] = self.cotangents[key] + cotangent if key in self.cotangents else cotangent

    # --- metrics --------------------------------------------------------------------------------------------------

    def _metrics(self) -> None:
        for loss in self.plan.losses:
            for measurement in loss.measurements:
                self._measurement(loss, measurement)
            for count in loss.counts:
                number = self.num_valid if count == "num_tokens" else self._segments_here()
                self.pending[f"{loss.name}/{count}"] = _Pending("sum", number, self.num_valid, 1.0)
        self._head_metrics()

    def _segments_here(self) -> Array:
        xp, ids = self.xp, self.inputs.segment_ids
        if self.has_lengths:
            return self.num_sequences * self.share
        known = self.valid & (ids >= 0) & (ids < self.num_segments)  # type: ignore[operator]
        lost = self.valid & (ids >= self.num_segments)  # type: ignore[operator]
        flat = xp.where(known, self.counted, 0.0).reshape(-1)[None]
        safe = xp.where(known, ids, self.num_segments).reshape(-1)
        lengths = xp.segment_sum(flat, safe, self.num_segments + 1)[0, :-1]
        poison = xp.sum_all(xp.where(lost, xp.nan, xp.zeros_like(self.counted)))
        return xp.sum_all(xp.where(lengths > 0, 1.0, xp.zeros_like(lengths))) + poison

    def _measurement(self, loss: PlannedLoss, measurement: PlannedMeasurement) -> None:
        xp = self.xp
        arguments = [self._value(operand) for operand in measurement.operands]
        outputs = measurement.measure.bound[xp.term_names(self.like)](*arguments)
        counted, count = self._counted(measurement.kind)
        one = xp.where(counted, xp.ones_like(self.num_valid), 0.0)
        for value, output in zip(outputs, measurement.outputs, strict=False):
            if not output.metrics:
                continue
            value = xp.cast(value + xp.zeros_like(one), one.dtype)
            product, weight = value, count
            if output.weight >= 0:
                weights = xp.cast(xp.where(counted, outputs[output.weight], 0.0), one.dtype)
                product = xp.where(weights == 0, 0.0, weights * value)
                weight = self._reduce("sum", measurement.kind, weights)
            self._metrics_of(loss.name, measurement.kind, output, value, product, weight)

    def _metrics_of(
        self, name: str, kind: str, output: Output, value: Array, product: Array, weight: Reduced | Array
    ) -> None:
        """Enters the metrics of one output of a measure."""
        xp, (counted, _) = self.xp, self._counted(kind)
        total: Reduced | None = None
        for metric, how in output.metrics:
            if how == "min":
                reduced = self._reduce("min", kind, xp.where(counted, value, xp.inf))
            elif how == "max":
                reduced = self._reduce("max", kind, xp.where(counted, value, -xp.inf))
            else:
                total = total or self._reduce("sum", kind, xp.where(counted, product, 0.0))
                reduced = total
            self.pending[f"{name}/{metric}"] = _Pending(how, reduced, weight, self._share(kind))

    def _counted(self, kind: str) -> tuple[Array, Array]:
        """(which tokens, sequences or pairs count, how many)."""
        if kind == "pair":
            return self.real_pair, self.num_pairs
        if kind == "sequence":
            return self.lengths != 0, self.num_sequences
        return self.valid, self.num_valid

    def _finished(self, pending: _Pending) -> Any:
        """A metric's part, once everything is reduced."""

        def scalar(item: Reduced | Array) -> Array:
            return self.reductions.value(item) if isinstance(item, Reduced) else item

        value, weight = scalar(pending.value), scalar(pending.weight) * pending.share
        return KINDS[pending.kind](value if pending.kind in ("min", "max") else value * pending.share, weight)

    def _head_metrics(self) -> None:
        xp, head = self.xp, self.plan.head

        def mean(name: str, value: Array, kind: str = "mean") -> None:
            total = self._reduce("sum", "token", xp.where(self.valid, value, 0.0))
            self.pending[f"head/{name}"] = _Pending(kind, total, self.num_valid, 1.0)

        for name in self.plan.head_metrics:
            if name == "num_tokens":
                self.pending["head/num_tokens"] = _Pending("sum", self.num_valid, self.num_valid, 1.0)
            elif name == "entropy":
                mean(name, self.statistics["entropy", head])
            elif name == "accuracy":
                mean(name, self.statistics["is_top", head])
            elif name == "mean_logprob":
                mean(name, self.statistics["logprob", head])
            else:
                mean(name, -self.statistics["logprob", head], "exp_mean")

    def _token_outputs(self) -> dict[str, Array]:
        names = {"logprobs": "logprob", "entropy": "entropy", "lse": "lse"}
        return {
            name: self.xp.where(self.valid, self.statistics[names[name], self.plan.head], 0.0)
            for name in self.plan.tokens
        }


def _key(operand: Operand) -> tuple[Any, ...]:
    if operand.name == "jsd":
        return ("jsd", operand.index, operand.beta)
    return (operand.name, operand.index)
