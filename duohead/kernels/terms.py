"""The source of a plan's terms: values, measures and derivatives, over a row or over a chunk of tokens."""

from __future__ import annotations

import functools
from typing import Any

from duohead.fold import FOLD_PAIRING, FOLD_SOFTMAX
from duohead.kernels import sweeps
from duohead.kernels.layout import layout_of, saved_names, statistic_key
from duohead.kernels.row import store
from duohead.plan import Operand, Plan, PlannedLoss
from duohead.statistics import Normalisers, Statistics
from duohead.term import Bound

SEQUENCE_REDUCTIONS = ("sequence_mean_token_mean", "sequence_mean_token_sum")


class TermCode:
    """Operands, weights, values and derivatives of a plan's terms of one kind; collects the functions it calls."""

    #: the terms' kind: token, sequence or pair
    kind = "token"
    #: the name of what says which rows, tokens, sequences or pairs count
    exists = "exists"
    #: where a token's inputs are
    place = "tokens"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.functions: dict[str, Bound] = {}
        self.hyper: set[int] = set()
        #: loads of what an earlier step counted
        self.counts: list[str] = []
        self.cotangents: dict[tuple[Any, ...], str] = {}

    def loads(self) -> list[str]:
        """Loads of the hyperparameters, inputs and counts that the code made so far needs."""
        return [*self.load_hyper(), *self.load_inputs(), *dict.fromkeys(self.counts)]

    def load_hyper(self) -> list[str]:
        return [f"hyper{slot} = tl.load(hyper + {slot})" for slot in sorted(self.hyper)]

    def load_inputs(self) -> list[str]:
        return [
            f"token{n}_row = tl.load(token{n} + {self.place}, mask={self.exists}, other=0.0).to(tl.float32)"
            for n, _ in enumerate(self.plan.input_names)
        ]

    def call(self, item: Bound) -> str:
        """The name by which the source calls a function."""
        for name, known in self.functions.items():
            if known is item:
                return name
        name = f"function{len(self.functions)}"
        self.functions[name] = item
        return name

    def slot(self, slot: int) -> str:
        self.hyper.add(slot)
        return f"hyper{slot}"

    def operand(self, operand: Operand) -> str:
        """An operand as an expression."""
        if operand.source == "hyper":
            return self.slot(operand.index)
        if operand.source == "one":
            return "one"
        if operand.source == "input":
            return f"token{operand.index}_row"
        return statistic_name(statistic_key(operand), self.plan)

    def count(self, name: str) -> str:
        """The number of valid tokens, sequences or pairs, as an earlier step counted them."""
        self.counts.append(f"{name}_here = tl.load({name})")
        return f"{name}_here"

    # --- weights ---

    def weights(self) -> list[str]:
        """What the weights of several losses share."""
        plan, lines = self.plan, ["one = tl.full((), 1.0, tl.float32)"]
        if any(loss.reduction == "token_mean" for loss in plan.losses):
            tokens = self.slot(plan.num_tokens) if plan.num_tokens >= 0 else self.count("valid_count")
            lines.append(f"by_tokens = inverse({tokens})")
        if any(loss.reduction in SEQUENCE_REDUCTIONS for loss in plan.losses):
            sequences = self.slot(plan.num_sequences) if plan.num_sequences >= 0 else self.count("sequence_count")
            lines.append(f"by_sequences = inverse({sequences})")
            self.counts.append(f"length = tl.load(lengths + {self.place}, mask={self.exists}, other=0.0)")
        return lines

    def weight(self, loss: PlannedLoss) -> str:
        """The weight of a loss's elements, as in ``duohead.reductions``."""
        if loss.reduction == "token_mean":
            return "by_tokens"
        if loss.reduction == "constant":
            return f"inverse({self.slot(loss.denominator)})"
        if loss.reduction == "sequence_mean_token_sum":
            return "tl.where(length != 0.0, by_sequences, 0.0)"
        if loss.reduction == "sequence_mean_token_mean":
            return "by_sequences * inverse(length)"
        return "1.0"

    # --- derivatives ---

    def derivatives(self) -> list[str]:
        """Every term's derivatives, entered where they belong."""
        lines: list[str] = []
        for n, loss in enumerate(self.plan.losses):
            parts = [part for part in loss.parts if part.kind == self.kind]
            if not parts:
                continue
            factor = self.slot(loss.weight)
            lines += [f"weight{n} = {self.weight(loss)}", f"factor{n} = {factor} * weight{n}"]
            for part in parts:
                arguments = ", ".join(self.operand(operand) for operand in part.operands)
                lines.append(f"result = {self.call(part.term)}({arguments})")
                for d, operand in enumerate(part.differentiable):
                    lines += self.enter(operand, f"factor{n} * result[{1 + d}]", f"factor{n}")
        return lines

    def enter(self, operand: Operand, value: str, factor: str) -> list[str]:
        """Adds a weighted derivative to the cotangent of its operand."""
        return self.add(statistic_key(operand), self.guarded(value, factor))

    def guarded(self, value: str, factor: str) -> str:
        """A weighted derivative; a loss of weight 0 adds exactly nothing, and so does what does not count."""
        return f"tl.where({self.exists}, tl.where({factor} != 0.0, {value}, 0.0), 0.0)"

    def add(self, key: tuple[Any, ...], cotangent: str) -> list[str]:
        """Adds to the cotangent of a key."""
        if key in self.cotangents:
            name = self.cotangents[key]
            return [f"{name} = {name} + {cotangent}"]
        self.cotangents[key] = name = "d_" + "_".join(str(part) for part in key)
        return [f"{name} = {cotangent}"]

    # --- values ---

    def values(self) -> list[str]:
        """``row0 …``: those rows of the layout that are over this kind."""
        return [*self._losses(), *self._measures()]

    def _row(self, row: int, value: str) -> str:
        return f"row{row} = tl.where({self.exists}, {value}, 0.0)"

    def _losses(self) -> list[str]:
        lines: list[str] = []
        for row, key in enumerate(layout_of(self.plan).rows):
            if key[0] != "loss" or key[2] != self.kind:
                continue
            n, loss = key[1], self.plan.losses[key[1]]
            lines += [f"weight{n} = {self.weight(loss)}", f"loss{n} = 0.0"]
            for part in (part for part in loss.parts if part.kind == self.kind):
                arguments = ", ".join(self.operand(operand) for operand in part.operands)
                lines.append(f"result = {self.call(part.term)}({arguments})")
                lines.append(f"loss{n} = loss{n} + tl.where(weight{n} != 0.0, weight{n} * result[0], 0.0)")
            lines.append(self._row(row, f"loss{n}"))
        return lines

    def _measures(self) -> list[str]:
        rows, lines = layout_of(self.plan).rows, []
        for i, loss in enumerate(self.plan.losses):
            for m, measurement in enumerate(loss.measurements):
                wanted = [(row, key) for row, key in enumerate(rows) if key[:3] in _rows_of_measure(i, m)]
                if not wanted or measurement.kind != self.kind:
                    continue
                arguments = ", ".join(self.operand(operand) for operand in measurement.operands)
                lines.append(f"outputs = {self.call(measurement.measure)}({arguments})")
                for row, (kind, _, _, o) in wanted:
                    value = f"outputs[{o}]"
                    if kind == "product":
                        weight = f"outputs[{measurement.outputs[o].weight}]"
                        value = f"tl.where({weight} == 0.0, 0.0, {weight} * {value})"
                    lines.append(self._row(row, value))
        return lines


def _rows_of_measure(loss: int, measurement: int) -> tuple[tuple[Any, ...], ...]:
    return (("output", loss, measurement), ("product", loss, measurement))


class FoldCode(TermCode):
    """Derivatives per token, folded into the coefficients of the write."""

    def fold(self) -> list[str]:
        """Cotangents → coefficients, as in ``duohead.fold``."""
        plan, lines = self.plan, ["inverse_size = 1.0 / size"]
        fold = self.call(FOLD_SOFTMAX)
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
            lines.append(f"folded = {self.call(FOLD_PAIRING)}({', '.join(arguments)})")
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


class RowCode(FoldCode):
    """Inside a row's program: the terms' derivatives, folded. Values and measures wait for ``TokenCode``."""

    exists = "valid_row"
    place = "row"

    def lines(self) -> tuple[list[str], list[str]]:
        """(loads, derivatives and fold); the loads go before the read, which hides them: nothing else would."""
        body = [*self.weights(), *self.derivatives(), *self.fold()]
        return self.loads(), body

    def store_statistics(self) -> list[str]:
        """Stores what ``TokenCode`` reads."""
        return store("rows", [statistic_name(key, self.plan) for key in layout_of(self.plan).stored])


class TokenCode(TermCode):
    """Over a chunk of tokens: every value and measure, from the statistics that the rows' programs stored."""

    def lines(self) -> list[str]:
        """Loads, then ``row0 …``, the rows of the layout."""
        body = [*self.weights(), *self.values(), *self.statistic_rows()]
        statistics = [
            f"{statistic_name(key, self.plan)} = tl.load(rows + {n} * count_rows + tokens, mask=exists, other=0.0)"
            for n, key in enumerate(layout_of(self.plan).stored)
        ]
        return [*self.loads(), *statistics, *body]

    def statistic_rows(self) -> list[str]:
        """Those rows of the layout that are statistics themselves."""
        return [
            self._row(n, statistic_name(key[1:], self.plan))
            for n, key in enumerate(layout_of(self.plan).rows)
            if key[0] == "statistic"
        ]


def statistic_name(key: tuple[Any, ...], plan: Plan) -> str:
    """A statistic's name in the source."""
    if key[0] == "jsd":
        return f"js{key[1]}_{plan.pairings[key[1]].jsd.index(key[2])}"
    if key[0] == "negative_logprob":
        return f"(-logprob{key[1]})"
    return f"{key[0]}{key[1]}"


class FoldedTokenCode(FoldCode, TokenCode):
    """Over a chunk of tokens, where a read alone stored the statistics: derivatives, the fold, values and measures."""

    def lines(self) -> list[str]:
        plan = self.plan
        body = [*self.weights(), *self.derivatives(), *self.of_sequences(), *self.fold(), *self._store()]
        body += [*self.values(), *self.statistic_rows()]
        rows = [
            f"{name} = tl.load(rows + {n} * count_rows + tokens, mask=exists, other=0.0)"
            for n, name in enumerate(read_names(plan))
        ]
        return [*self.loads(), *rows, *sweeps.scales(plan), *body]

    def of_sequences(self) -> list[str]:
        """What the tokens' sequences add to the cotangents: nothing where every term is over tokens."""
        return []

    def _store(self) -> list[str]:
        return [
            f"tl.store(saved + {n} * count_rows + tokens, tl.where(exists, {name}, 0.0), mask=inside)"
            for n, name in enumerate(saved_names(self.plan))
        ]


def read_rows(names: tuple[str, ...], plan: Plan, statistics: Statistics, normalisers: Normalisers) -> list[Any]:
    """The rows of these ``read_names`` as the array code has them: from shards that were merged."""
    found = {statistic_name(key, plan): value for key, value in statistics.items() if key[0] != "jsd_mean"}
    for i, (top, log_sum) in enumerate(normalisers.softmax):
        found |= {f"top{i}": top, f"log_sum{i}": log_sum}
    for k, (top, log_sum) in enumerate(normalisers.teacher):
        found |= {f"teacher_top{k}": top, f"teacher_log_sum{k}": log_sum}
    for j, pairing in enumerate(plan.pairings):
        found |= {f"jr{j}_{b}": statistics["jsd_mean", j, slot] for b, slot in enumerate(pairing.jsd)}
    return [found[name] for name in names]


@functools.lru_cache(maxsize=256)
def read_names(plan: Plan) -> tuple[str, ...]:
    """What a read alone stores per token, by name in the source: ``layout.stored``, then what else the fold needs."""
    names = [statistic_name(key, plan) for key in layout_of(plan).stored]
    for i, softmax in enumerate(plan.softmaxes):
        names += [f"top{i}", f"log_sum{i}"]
        names += [f"entropy{i}"] if softmax.entropy else []
        names += [f"share{i}"] if softmax.mean_logprob else []
    for k, _ in enumerate(plan.teachers):
        names += [f"teacher_top{k}", f"teacher_log_sum{k}"]
    for j, pairing in enumerate(plan.pairings):
        names += [f"reverse_kl{j}"] if pairing.reverse_kl else []
        names += [f"jr{j}_{b}" for b, _ in enumerate(pairing.jsd)]
    return tuple(dict.fromkeys(names))
