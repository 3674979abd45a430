"""Specs → what one pass must compute: softmaxes, teachers, statistics, sequence sums and terms.

A plan is structure only, hashable and free of numbers. Every number (weights, scales, temperatures, clip ranges …)
goes to a list of hyperparameters beside it, so that changing one changes no program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from duohead.fields import Number
from duohead.loss import Loss, Measurement
from duohead.term import (
    INPUTS,
    TEACHER_STATISTICS,
    Measure,
    Term,
    pair_quantity,
    sequence_quantity,
)


class Softmax(NamedTuple):
    """One softmax of the logits: the slot of its scale, and which statistics of it are wanted."""

    scale: int
    logprob: bool
    entropy: bool
    mean_logprob: bool
    is_top: bool = False


class Teacher(NamedTuple):
    """One softmax of a teacher's logits: which array, and the slot of its scale."""

    array: int
    scale: int


class Pairing(NamedTuple):
    """A student softmax beside a teacher softmax, and which distances are wanted; ``jsd``: slots of β."""

    softmax: int
    teacher: int
    teacher_cross_entropy: bool
    forward_kl: bool
    reverse_kl: bool
    jsd: tuple[int, ...]


class Operand(NamedTuple):
    """Where a term's parameter comes from.

    ``source`` is ``statistic`` (index of its softmax or pairing), ``input`` (index of the array), ``hyper`` (slot),
    ``one``, or ``sequence`` / ``carried`` / ``chosen`` / ``rejected`` (index of the sequence sum; ``name`` is
    ``sum`` or ``mean``).
    """

    source: str
    name: str
    index: int  # type: ignore[assignment]  # a field of this name hides tuple.index, which nothing calls
    beta: int = -1


class SequenceSum(NamedTuple):
    """A row of the packed sequence sums: ``base`` or ``base − minus``, each an operand."""

    base: Operand
    minus: Operand | None


class PlannedPart(NamedTuple):
    term: Term
    kind: str
    operands: tuple[Operand, ...]
    #: the operands that the term differentiates, in its order
    differentiable: tuple[Operand, ...]


class PlannedMeasurement(NamedTuple):
    measure: Measure
    kind: str
    operands: tuple[Operand, ...]
    outputs: tuple[Any, ...]


class PlannedLoss(NamedTuple):
    name: str
    weight: int
    reduction: str
    denominator: int
    parts: tuple[PlannedPart, ...]
    measurements: tuple[PlannedMeasurement, ...]
    counts: tuple[str, ...]
    carried_by_tokens: bool

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(part.kind for part in self.parts)


class Plan(NamedTuple):
    """Everything static about one fused pass."""

    softcap: int
    softmaxes: tuple[Softmax, ...]
    teachers: tuple[Teacher, ...]
    pairings: tuple[Pairing, ...]
    sums: tuple[SequenceSum, ...]
    losses: tuple[PlannedLoss, ...]
    #: index of the head's own softmax (loss scale 1), -1 where nothing asks for it
    head: int
    head_metrics: tuple[str, ...]
    tokens: tuple[str, ...]
    num_tokens: int
    num_sequences: int
    num_pairs: int
    teacher_names: tuple[str, ...]
    input_names: tuple[str, ...]

    @property
    def needs_labels(self) -> bool:
        return any(softmax.logprob for softmax in self.softmaxes)

    @property
    def needs_segments(self) -> bool:
        return bool(self.sums) or any(loss.reduction.startswith("sequence_") for loss in self.losses)

    @property
    def needs_pairs(self) -> bool:
        return any("pair" in loss.kinds for loss in self.losses)

    @property
    def has_jsd(self) -> bool:
        return any(pairing.jsd for pairing in self.pairings)


_METRIC_STATISTICS = {
    "entropy": "entropy",
    "accuracy": "is_top",
    "perplexity": "logprob",
    "mean_logprob": "logprob",
    "num_tokens": None,
}
_TOKEN_STATISTICS = {"logprobs": "logprob", "entropy": "entropy", "lse": None}
HEAD_METRICS = tuple(_METRIC_STATISTICS)
TOKENS = tuple(_TOKEN_STATISTICS)


class Given(NamedTuple):
    """Which inputs a call has: names of arrays, teachers and references."""

    inputs: frozenset[str]
    teachers: tuple[str, ...]
    references: tuple[str, ...]  # "" is a bare array


def same_number(a: Number, b: Number) -> bool:
    """Whether two hyperparameters are known to be equal: the same object, or equal Python numbers."""
    if a is b:
        return True
    # Not ==: Dynamo would replace one symbolic number by the other, and then make it a constant as nothing uses it.
    return isinstance(a, (int, float)) and isinstance(b, (int, float)) and a <= b and a >= b


def joined(a: Number, b: Number) -> Number:
    """One number for two equal ones; both stay in use, for Dynamo makes a constant of a number that nothing uses."""
    return a if a is b else 0.5 * a + 0.5 * b


class Planner:
    """Collects what the losses ask for, sharing whatever they have in common."""

    def __init__(self, given: Given, logits_scale_factor: Number, softcap: Number | None) -> None:
        self.given = given
        self.hyper: list[Number] = []
        self.head_scale = logits_scale_factor
        self.softcap = -1 if softcap is None else self.slot(softcap)
        self.scales: list[tuple[Number, Number]] = []
        self.softmaxes: list[Softmax] = []
        self.teacher_keys: list[tuple[str, Number, Number]] = []
        self.teachers: list[Teacher] = []
        self.teacher_names: list[str] = []
        self.pairings: list[Pairing] = []
        self.sums: list[SequenceSum] = []
        self.input_names: list[str] = []

    def slot(self, value: Number) -> int:
        self.hyper.append(value)
        return len(self.hyper) - 1

    def join(self, slot: int, value: Number) -> None:
        """Enters a number that equals the one in the slot."""
        self.hyper[slot] = joined(self.hyper[slot], value)

    def softmax(self, scale: tuple[Number, Number], statistic: str | None) -> int:
        """The index of the softmax of this (loss scale, student temperature), which is to give ``statistic``."""
        value = self.head_scale * scale[0] / scale[1]
        index = -1
        for i, (factor, temperature) in enumerate(self.scales):
            if same_number(factor, scale[0]) and same_number(temperature, scale[1]):
                index = i
        if index < 0:
            index = len(self.scales)
            self.scales.append(scale)
            self.softmaxes.append(Softmax(self.slot(value), False, False, False))
        else:
            self.join(self.softmaxes[index].scale, value)
        old = self.softmaxes[index]
        self.softmaxes[index] = Softmax(
            old.scale,
            old.logprob or statistic in ("logprob", "is_top"),
            old.entropy or statistic == "entropy",
            old.mean_logprob or statistic == "mean_logprob",
            old.is_top or statistic == "is_top",
        )
        return index

    def teacher(self, name: str, factor: Number, temperature: Number) -> int:
        value = self.head_scale * factor / temperature
        for i, (known, known_factor, known_temperature) in enumerate(self.teacher_keys):
            if known == name and same_number(known_factor, factor) and same_number(known_temperature, temperature):
                self.join(self.teachers[i].scale, value)
                return i
        self.teacher_keys.append((name, factor, temperature))
        if name not in self.teacher_names:
            self.teacher_names.append(name)
        self.teachers.append(Teacher(self.teacher_names.index(name), self.slot(value)))
        return len(self.teachers) - 1

    def pairing(self, loss: Loss, statistic: str, beta: int) -> int:
        teacher = loss.teacher
        assert teacher is not None
        softmax_index = self.softmax(loss.student_scale, None)
        teacher_index = self.teacher(teacher[0], loss.logits_scale_factor, teacher[1])
        index = -1
        for i, known in enumerate(self.pairings):
            if known.softmax == softmax_index and known.teacher == teacher_index:
                index = i
        if index < 0:
            index = len(self.pairings)
            self.pairings.append(Pairing(softmax_index, teacher_index, False, False, False, ()))
        old = self.pairings[index]
        self.pairings[index] = Pairing(
            softmax_index,
            teacher_index,
            old.teacher_cross_entropy or statistic == "teacher_cross_entropy",
            old.forward_kl or statistic == "forward_kl",
            old.reverse_kl or statistic == "reverse_kl",
            (*old.jsd, beta) if statistic == "jsd" else old.jsd,
        )
        return index

    def input(self, name: str, name_of_loss: str, loss: Loss) -> int:
        key = name
        if name == "ref_logprobs":
            reference = loss.reference
            if reference is not None and self.given.references and self.given.references != ("",):
                key = f"ref_logprobs/{reference}"
                if reference not in self.given.references:
                    raise ValueError(
                        f"ref_logprobs: loss {name_of_loss!r} ({loss.type}) needs the reference {reference!r}, "
                        f"given: {', '.join(self.given.references)}"
                    )
            elif self.given.references == ("",) or not self.given.references:
                key = "ref_logprobs"
            elif len(self.given.references) == 1:
                key = f"ref_logprobs/{self.given.references[0]}"
            else:
                raise ValueError(
                    f"ref_logprobs: loss {name_of_loss!r} ({loss.type}) has no reference_model, and several were "
                    f"given: {', '.join(self.given.references)}"
                )
        if name not in self.given.inputs:
            raise ValueError(f"{name}: loss {name_of_loss!r} ({loss.type}) needs it, none was given")
        if key not in self.input_names:
            self.input_names.append(key)
        return self.input_names.index(key)

    def sequence_sum(self, base: Operand, minus: Operand | None) -> int:
        wanted = SequenceSum(base, minus)
        if wanted not in self.sums:
            self.sums.append(wanted)
        return 1 + self.sums.index(wanted)  # row 0 holds the lengths

    def operand(self, operand: str, values: Mapping[str, int], parameter: str, name: str, loss: Loss) -> Operand:
        """Resolves one parameter of a term of the loss called ``name``."""
        if parameter in values:
            return Operand("hyper", "", values[parameter])
        if operand == "importance_weights" and operand not in self.given.inputs:
            return Operand("one", "", 0)
        if operand in INPUTS:
            return Operand("input", operand, self.input(operand, name, loss))
        if operand in TEACHER_STATISTICS:
            beta = values.get("jsd_beta", -1)
            return Operand("statistic", operand, self.pairing(loss, operand, beta), beta if operand == "jsd" else -1)
        side = pair_quantity(operand)
        if side is not None:
            return self._quantity(side[0], side[1], name, loss)
        if operand.startswith("carried_"):
            return self._quantity("carried", operand.removeprefix("carried_"), name, loss)
        if sequence_quantity(operand) is not None:
            return self._quantity("sequence", operand, name, loss)
        return Operand("statistic", operand, self.softmax(loss.student_scale, operand))

    def _quantity(self, source: str, quantity: str, name: str, loss: Loss) -> Operand:
        if "segment_ids" not in self.given.inputs:
            raise ValueError(f"segment_ids: loss {name!r} ({loss.type}) needs it, none was given")
        if source in ("chosen", "rejected") and "preference_pairs" not in self.given.inputs:
            raise ValueError(f"preference_pairs: loss {name!r} ({loss.type}) needs it, none was given")
        parsed = sequence_quantity(quantity)
        assert parsed is not None
        what, how = parsed
        if what == "length":
            return Operand(source, "sum", 0)
        if what == "importance_weights" and what not in self.given.inputs:
            return Operand("one", "", 0)
        if what == "log_ratio":
            row = self.sequence_sum(self._data("logprob", name, loss), self._data("old_logprobs", name, loss))
        elif what == "ref_log_ratio":
            row = self.sequence_sum(self._data("logprob", name, loss), self._data("ref_logprobs", name, loss))
        else:
            row = self.sequence_sum(self._data(what, name, loss), None)
        return Operand(source, how, row)

    def _data(self, what: str, name: str, loss: Loss) -> Operand:
        return self.operand(what, {}, "", name, loss)

    def loss(self, name: str, loss: Loss) -> PlannedLoss:
        if loss.reduction.startswith("sequence_") and "segment_ids" not in self.given.inputs:
            raise ValueError(
                f"segment_ids: loss {name!r} ({loss.type}) needs it for reduction {loss.reduction!r}, none was given"
            )
        teacher = loss.teacher
        if teacher is not None and teacher[0] not in self.given.teachers:
            found = ", ".join(repr(model) for model in self.given.teachers) or "none"
            raise ValueError(
                f"teacher_logits: loss {name!r} ({loss.type}) needs the teacher {teacher[0]!r}, given: {found}"
            )
        parts = []
        for part in loss.parts(self.given.inputs):
            slots = {parameter: self.slot(value) for parameter, value in part.values.items()}
            operands = self.resolve(part.term.operands, slots, name, loss)
            wanted = part.term.differentiable
            differentiable = tuple(
                operand for parameter, operand in zip(part.term.operands, operands, strict=True) if parameter in wanted
            )
            parts.append(PlannedPart(part.term, part.term.kind, operands, differentiable))
        return PlannedLoss(
            name,
            self.slot(loss.weight),
            loss.reduction,
            -1 if loss.denominator is None else self.slot(loss.denominator),
            tuple(parts),
            tuple(self.measurement(item, name, loss) for item in loss.measurements(self.given.inputs)),
            loss.counts(self.given.inputs),
            loss.carried_by_tokens,
        )

    def plan(
        self,
        losses: tuple[PlannedLoss, ...],
        head: int = -1,
        head_metrics: Sequence[str] = (),
        tokens: Sequence[str] = (),
        counts: tuple[int, ...] = (-1, -1, -1),
    ) -> Plan:
        """What has been collected, as a plan."""
        return Plan(
            self.softcap,
            tuple(self.softmaxes),
            tuple(self.teachers),
            tuple(self.pairings),
            tuple(self.sums),
            losses,
            head,
            tuple(head_metrics),
            tuple(tokens),
            counts[0],
            counts[1],
            counts[2],
            tuple(self.teacher_names),
            tuple(self.input_names),
        )

    def measurement(self, item: Measurement, name: str, loss: Loss) -> PlannedMeasurement:
        slots = {parameter: self.slot(value) for parameter, value in item.values.items()}
        operands = self.resolve(item.measure.operands, slots, name, loss)
        return PlannedMeasurement(item.measure, item.measure.kind, operands, item.outputs)

    def resolve(
        self, operands: Mapping[str, str], slots: Mapping[str, int], name: str, loss: Loss
    ) -> tuple[Operand, ...]:
        return tuple(self.operand(operand, slots, parameter, name, loss) for parameter, operand in operands.items())


def make_plan(
    losses: Mapping[str, Loss],
    given: Given,
    *,
    logits_scale_factor: Number = 1.0,
    final_logit_softcap: Number | None = None,
    head_metrics: Sequence[str] = (),
    tokens: Sequence[str] = (),
    num_tokens: Number | None = None,
    num_sequences: Number | None = None,
    num_pairs: Number | None = None,
) -> tuple[Plan, list[Number]]:
    """The plan of one fused pass over ``losses``, and the hyperparameters in the order of its slots.

    Raises:
        ValueError: where a loss needs an input that the call does not have; the message names both.
    """
    planner = Planner(given, logits_scale_factor, final_logit_softcap)
    planned = tuple(planner.loss(name, loss) for name, loss in losses.items())
    head = -1
    for statistic in (
        *(_METRIC_STATISTICS[metric] for metric in head_metrics),
        *(_TOKEN_STATISTICS[token] for token in tokens),
    ):
        head = planner.softmax((1.0, 1.0), statistic)
    counts = tuple(-1 if count is None else planner.slot(count) for count in (num_tokens, num_sequences, num_pairs))
    return planner.plan(planned, head, head_metrics, tokens, counts), planner.hyper
