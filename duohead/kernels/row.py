"""The source of what happens to one row between its two sweeps: statistics, terms, fold."""

from __future__ import annotations

from typing import Any

from duohead.fold import FOLD_PAIRING, FOLD_SOFTMAX
from duohead.kernels import sweeps
from duohead.kernels.layout import layout_of, saved_names, statistic_key
from duohead.plan import Operand, Plan, PlannedLoss
from duohead.statistics import rows_of
from duohead.term import Bound

#: what a fused launch needs to know of every token before it: sequence reductions need the lengths
SEQUENCE_REDUCTIONS = ("sequence_mean_token_mean", "sequence_mean_token_sum")


def place(has_labels: bool, sharded: bool, needs_label: bool) -> list[str]:
    """The row's label: is it past the vocabulary, and at which of these columns is it?"""
    if not has_labels:
        return []
    lines = [
        "label = tl.load(labels + row, mask=valid_row, other=0).to(tl.int64)",
        "bad = valid_row & (label >= size)",
    ]
    if needs_label:
        lines.append("place = label - start" if sharded else "place = label")
        lines.append("owned = valid_row & (place >= 0) & (place < real)")
    return lines


def partial_rows(plan: Plan) -> dict[tuple[str, int], str]:
    """The rows of ``duohead.statistics.rows_of`` as expressions in the sweep's sums."""
    found: dict[tuple[str, int], str] = {}
    for i, _ in enumerate(plan.softmaxes):
        found["max", i] = f"tl.where(s{i} == 0.0, -INFINITY, top * scale{i})"
        found["sum", i] = f"s{i}"
        found["label", i] = f"tl.where(owned & (label_logit != top), (label_logit - top) * scale{i}, 0.0)"
        found["weighted", i] = f"h{i} * LN2"
        found["total", i] = f"total * scale{i}"
        found["count", i] = "count"
    for k, teacher in enumerate(plan.teachers):
        found["teacher_max", k] = f"tl.where(t{k} == 0.0, -INFINITY, top_y{teacher.array} * teacher_scale{k})"
        found["teacher_sum", k] = f"t{k}"
    for j, _ in enumerate(plan.pairings):
        found["teacher_cross_entropy", j] = f"ce{j} * LN2"
        found["forward_kl", j] = f"fk{j} * LN2"
        found["reverse_kl", j] = f"rk{j} * LN2"
    return found


def store_partial_rows(plan: Plan) -> list[str]:
    """Stores the partial rows for the array code between two launches; a row that does not exist is as zeros are."""
    expressions = partial_rows(plan)
    lines = []
    for n, key in enumerate(rows_of(plan)):
        other = "1.0" if key[0] in ("sum", "teacher_sum") else "0.0"
        lines.append(f"tl.store(rows + {n} * count_rows + row, tl.where(valid_row, {expressions[key]}, {other}))")
    return lines


def statistics(plan: Plan, has_labels: bool) -> list[str]:
    """The whole vocabulary's row → statistics and normalisers, as in ``duohead.statistics.finish``."""
    lines = []
    log = "tl.where(bad, float('nan'), tl.log(s{i}))" if has_labels else "tl.log(s{i})"
    for i, softmax in enumerate(plan.softmaxes):
        lines += [
            f"top{i} = top * scale{i}",
            f"log_sum{i} = {log.format(i=i)}",
            f"lse{i} = tl.where(s{i} == 0.0, -INFINITY, top{i} + log_sum{i})",
            # A row of -inf alone is taken relative to 0.
            f"top{i} = tl.where(s{i} == 0.0, 0.0, top{i})",
            f"log2_sum{i} = log_sum{i} * LOG2E",
        ]
        if softmax.logprob:
            lines += [
                # Compared, not subtracted: contracted with the cap's product, the difference at the top is not 0.
                f"at_label{i} = tl.where(owned & (label_logit != top), (label_logit - top) * scale{i}, 0.0)",
                f"logprob{i} = at_label{i} - log_sum{i}",
                f"is_top{i} = tl.where(at_label{i} == 0.0, 1.0, 0.0)",
            ]
        if softmax.entropy:
            lines.append(f"entropy{i} = log_sum{i} - h{i} * LN2 / s{i}")
        if softmax.mean_logprob:
            lines += [
                f"share{i} = count / size",
                f"mean_logprob{i} = (total * scale{i} - count * log_sum{i}) / size",
            ]
    for k, teacher in enumerate(plan.teachers):
        lines += [
            f"teacher_top{k} = tl.where(t{k} == 0.0, 0.0, top_y{teacher.array} * teacher_scale{k})",
            f"teacher_log_sum{k} = tl.log(t{k})",
            f"teacher_log2_sum{k} = teacher_log_sum{k} * LOG2E",
        ]
    for j, pairing in enumerate(plan.pairings):
        i, k = pairing.softmax, pairing.teacher
        if pairing.teacher_cross_entropy:
            lines.append(f"teacher_cross_entropy{j} = log_sum{i} - ce{j} * LN2 / t{k}")
        if pairing.forward_kl:
            lines.append(f"forward_kl{j} = fk{j} * LN2 / t{k} - (teacher_log_sum{k} - log_sum{i})")
        if pairing.reverse_kl:
            lines.append(f"reverse_kl{j} = rk{j} * LN2 / s{i} - (log_sum{i} - teacher_log_sum{k})")
    return lines


def load_normalisers(plan: Plan) -> list[str]:
    """The saved normalisers, for a sweep in a launch of its own."""
    names = saved_names(plan)[: 2 * (len(plan.softmaxes) + len(plan.teachers))]
    lines = [f"{name} = tl.load(saved + {n} * count_rows + row)" for n, name in enumerate(names)]
    lines += [f"log2_sum{i} = log_sum{i} * LOG2E" for i, _ in enumerate(plan.softmaxes)]
    return lines + [f"teacher_log2_sum{k} = teacher_log_sum{k} * LOG2E" for k, _ in enumerate(plan.teachers)]


def load_coefficients(plan: Plan) -> list[str]:
    """The saved coefficients, as the first launch stored them or the array code computed them."""
    first = 2 * (len(plan.softmaxes) + len(plan.teachers))
    return [
        f"{name} = tl.load(saved + {n} * count_rows + row)" for n, name in enumerate(saved_names(plan)) if n >= first
    ]


def apply_upstream(plan: Plan) -> list[str]:
    """Multiplies every coefficient (R of the JSD is a mean, not a weight); B and C go with log2."""
    first = 2 * (len(plan.softmaxes) + len(plan.teachers))
    lines = []
    for name in saved_names(plan)[first:]:
        if name.startswith("R"):
            continue
        unit = " * LN2" if name[0] in "BC" else ""
        lines.append(f"{name} = {name} * factor{unit}")
    return lines


def store_saved(plan: Plan) -> list[str]:
    """Stores normalisers and coefficients, so that the gradient can be written again."""
    return [
        f"tl.store(saved + {n} * count_rows + row, tl.where(valid_row, {name}, 0.0))"
        for n, name in enumerate(saved_names(plan))
    ]


class _Terms:
    """Operands and weights of a plan whose losses are all per token; collects the functions that the code calls."""

    #: the name of what says which rows or tokens exist
    exists = "valid_row"
    #: where a row's or token's inputs are
    place = "row"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.functions: dict[str, Bound] = {}
        self.hyper: set[int] = set()
        #: loads of what an earlier step counted
        self.counts: list[str] = []
        self.cotangents: dict[tuple[Any, ...], str] = {}

    def _loads(self) -> list[str]:
        hyper = [f"hyper{slot} = tl.load(hyper + {slot})" for slot in sorted(self.hyper)]
        inputs = [
            f"token{n}_row = tl.load(token{n} + {self.place}, mask={self.exists}, other=0.0).to(tl.float32)"
            for n, _ in enumerate(self.plan.input_names)
        ]
        return [*hyper, *inputs, *self.counts]

    def _call(self, item: Bound) -> str:
        for name, known in self.functions.items():
            if known is item:
                return name
        name = f"function{len(self.functions)}"
        self.functions[name] = item
        return name

    def _slot(self, slot: int) -> str:
        self.hyper.add(slot)
        return f"hyper{slot}"

    def _operand(self, operand: Operand) -> str:
        if operand.source == "hyper":
            return self._slot(operand.index)
        if operand.source == "one":
            return "one"
        if operand.source == "input":
            return f"token{operand.index}_row"
        return statistic_name(statistic_key(operand), self.plan)

    def _count(self, name: str) -> str:
        self.counts.append(f"{name}_here = tl.load({name})")
        return f"{name}_here"

    # --- weights ---

    def _weights(self) -> list[str]:
        plan, lines = self.plan, []
        if any(loss.reduction == "token_mean" for loss in plan.losses):
            tokens = self._slot(plan.num_tokens) if plan.num_tokens >= 0 else self._count("valid_count")
            lines.append(f"by_tokens = inverse({tokens})")
        if any(loss.reduction in SEQUENCE_REDUCTIONS for loss in plan.losses):
            sequences = self._slot(plan.num_sequences) if plan.num_sequences >= 0 else self._count("sequence_count")
            lines.append(f"by_sequences = inverse({sequences})")
            self.counts.append(f"length = tl.load(lengths + {self.place}, mask={self.exists}, other=0.0)")
        return lines

    def _weight(self, loss: PlannedLoss) -> str:
        if loss.reduction == "token_mean":
            return "by_tokens"
        if loss.reduction == "constant":
            return f"inverse({self._slot(loss.denominator)})"
        if loss.reduction == "sequence_mean_token_sum":
            return "tl.where(length != 0.0, by_sequences, 0.0)"
        if loss.reduction == "sequence_mean_token_mean":
            return "by_sequences * inverse(length)"
        return "1.0"


class RowCode(_Terms):
    """Inside a row's program: the terms' derivatives, folded. Values and measures wait for ``TokenCode``."""

    def lines(self) -> tuple[list[str], list[str]]:
        """(loads, derivatives and fold); the loads go before the read, which hides them: nothing else would."""
        body = ["one = tl.full((), 1.0, tl.float32)", *self._weights(), *self._derivatives(), *self._fold()]
        return self._loads(), body

    def store_statistics(self) -> list[str]:
        """Stores what ``TokenCode`` reads."""
        return [
            f"tl.store(rows + {n} * count_rows + row, tl.where(valid_row, {statistic_name(key, self.plan)}, 0.0))"
            for n, key in enumerate(layout_of(self.plan).stored)
        ]

    def _derivatives(self) -> list[str]:
        lines: list[str] = []
        for n, loss in enumerate(self.plan.losses):
            factor = self._slot(loss.weight)
            lines.append(f"weight{n} = {self._weight(loss)}")
            for part in loss.parts:
                arguments = ", ".join(self._operand(operand) for operand in part.operands)
                lines.append(f"result = {self._call(part.term)}({arguments})")
                for d, operand in enumerate(part.differentiable):
                    lines += self._enter(operand, f"{factor} * weight{n} * result[{1 + d}]", f"{factor} * weight{n}")
        return lines

    def _enter(self, operand: Operand, value: str, factor: str) -> list[str]:
        """Adds a weighted derivative to the cotangent of its statistic; a loss of weight 0 adds exactly nothing."""
        key = statistic_key(operand)
        cotangent = f"tl.where(valid_row & ({factor} != 0.0), {value}, 0.0)"
        if key in self.cotangents:
            name = self.cotangents[key]
            return [f"{name} = {name} + {cotangent}"]
        self.cotangents[key] = name = "d_" + "_".join(str(part) for part in key)
        return [f"{name} = {cotangent}"]

    # --- fold ---

    def _fold(self) -> list[str]:
        plan, lines = self.plan, ["inverse_size = 1.0 / size"]
        fold = self._call(FOLD_SOFTMAX)
        for i, softmax in enumerate(plan.softmaxes):
            arguments = [self._cotangent(name, i) for name in ("logprob", "lse", "entropy", "mean_logprob")]
            arguments.append(f"entropy{i}" if softmax.entropy else "0.0")
            arguments.append(f"share{i}" if softmax.mean_logprob else "0.0")
            lines.append(f"folded = {fold}({', '.join(arguments)}, inverse_size)")
            lines += [f"{letter}{i} = folded[{n}]" for n, letter in enumerate("ABEU")]
        for j, pairing in enumerate(plan.pairings):
            i = pairing.softmax
            arguments = [self._cotangent(name, j) for name in ("teacher_cross_entropy", "forward_kl", "reverse_kl")]
            arguments.append(f"reverse_kl{j}" if pairing.reverse_kl else "0.0")
            lines.append(f"folded = {self._call(FOLD_PAIRING)}({', '.join(arguments)})")
            lines += [
                f"A{i} = A{i} + folded[0]",
                f"B{i} = B{i} + folded[1]",
                f"C{j} = folded[2] * scale{i}",
                f"D{j} = folded[3] * scale{i}",
            ]
            for b, slot in enumerate(pairing.jsd):
                cotangent = self.cotangents.get(("jsd", j, slot), "0.0")
                lines += [f"J{j}_{b} = {cotangent} * (1.0 - beta{j}_{b}) * scale{i}", f"R{j}_{b} = jr{j}_{b}"]
        for i, _ in enumerate(plan.softmaxes):
            lines += [f"{letter}{i} = {letter}{i} * scale{i}" for letter in "ABEU"]
        return lines

    def _cotangent(self, name: str, index: int) -> str:
        return self.cotangents.get((name, index), "0.0")


class TokenCode(_Terms):
    """Over a chunk of tokens: every value and measure, from the statistics that the rows' programs stored."""

    exists = "exists"
    place = "tokens"

    def lines(self) -> list[str]:
        """Loads, then ``row0 …``, the rows of the layout."""
        body = ["one = tl.full((), 1.0, tl.float32)", *self._weights(), *self._losses(), *self._measures()]
        layout = layout_of(self.plan)
        statistics = [
            f"{statistic_name(key, self.plan)} = tl.load(rows + {n} * count_rows + tokens, mask=exists, other=0.0)"
            for n, key in enumerate(layout.stored)
        ]
        found = [
            self._row(n, statistic_name(key[1:], self.plan))
            for n, key in enumerate(layout.rows)
            if key[0] == "statistic"
        ]
        return [*self._loads(), *statistics, *body, *found]

    @staticmethod
    def _row(row: int, value: str) -> str:
        return f"row{row} = tl.where(exists, {value}, 0.0)"

    def _losses(self) -> list[str]:
        lines: list[str] = []
        for n, loss in enumerate(self.plan.losses):
            lines += [f"weight{n} = {self._weight(loss)}", f"loss{n} = 0.0"]
            for part in loss.parts:
                arguments = ", ".join(self._operand(operand) for operand in part.operands)
                lines.append(f"result = {self._call(part.term)}({arguments})")
                lines.append(f"loss{n} = loss{n} + tl.where(weight{n} != 0.0, weight{n} * result[0], 0.0)")
        for n, key in enumerate(layout_of(self.plan).rows):
            if key[0] == "loss":
                lines.append(self._row(n, f"loss{key[1]}"))
        return lines

    def _measures(self) -> list[str]:
        rows, lines = layout_of(self.plan).rows, []
        for i, loss in enumerate(self.plan.losses):
            for m, measurement in enumerate(loss.measurements):
                wanted = [(row, key) for row, key in enumerate(rows) if key[:3] in _rows_of_measure(i, m)]
                if not wanted:
                    continue
                arguments = ", ".join(self._operand(operand) for operand in measurement.operands)
                lines.append(f"outputs = {self._call(measurement.measure)}({arguments})")
                for row, (kind, _, _, o) in wanted:
                    value = f"outputs[{o}]"
                    if kind == "product":
                        weight = f"outputs[{measurement.outputs[o].weight}]"
                        value = f"tl.where({weight} == 0.0, 0.0, {weight} * {value})"
                    lines.append(self._row(row, value))
        return lines


def _rows_of_measure(loss: int, measurement: int) -> tuple[tuple[Any, ...], ...]:
    return (("output", loss, measurement), ("product", loss, measurement))


def statistic_name(key: tuple[Any, ...], plan: Plan) -> str:
    """A statistic's name in the source."""
    if key[0] == "jsd":
        return f"js{key[1]}_{plan.pairings[key[1]].jsd.index(key[2])}"
    if key[0] == "negative_logprob":
        return f"(-logprob{key[1]})"
    return f"{key[0]}{key[1]}"


def read_label_column(plan: Plan, accumulate: bool) -> list[str]:
    """The label's column, where any softmax needs its log-probability."""
    return sweeps.load_label_column(plan, accumulate) if plan.needs_labels else []


def row_pointers(plan: Plan, gradient: bool, accumulate: bool) -> list[str]:
    """Where the row begins in every array: 64-bit, whatever the tokens and the vocabulary."""
    lines = ["row_logits = logits + row * (logits_stride * UNIT)"]
    lines += [f"row_teacher{a} = teacher{a} + row * (teacher{a}_stride * UNIT)" for a in sweeps.teacher_arrays(plan)]
    lines += ["row_gradient = gradient + row * (gradient_stride * UNIT)"] if gradient else []
    return lines + (["row_old = old + row * (gradient_stride * UNIT)"] if accumulate else [])


def real_columns(padded: bool, sharded: bool) -> list[str]:
    """``real``: how many of these columns hold the vocabulary; none in a row that does not exist."""
    lines = ["columns = width * UNIT"]
    lines += ["start = tl.load(shard_start).to(tl.int64)"] if sharded else []
    if not padded:
        return [*lines, "real = columns * valid_row.to(tl.int32)"]
    first = "size - start" if sharded else "size"
    return [
        *lines,
        f"real = tl.minimum(tl.maximum({first}, 0), columns).to(tl.int32) * valid_row.to(tl.int32)",
    ]
