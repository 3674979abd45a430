"""What every loss has (weight, scale, reduction) and the open registry of loss types."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

from duohead.fields import Number, Rule, choice, number, rules_of
from duohead.term import Measure, Term

REDUCTIONS = ("token_mean", "sum", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")


class Part(NamedTuple):
    """One term of a loss, with the values of its hyperparameters; a loss is the sum of its parts."""

    term: Term
    values: dict[str, Number]


class OnlyWith(NamedTuple):
    """``field`` is used where ``other`` is ``value`` and refused elsewhere; ``required``: there it must be given."""

    field: str
    other: str
    value: str
    required: bool = False


class Output(NamedTuple):
    """One quantity of a measure and the metrics made of it: ``(metric name, kind)``, kind mean, min, max or sum.

    ``weight`` is the index of the output that weights a mean (default: every valid token or pair counts 1).
    """

    metrics: tuple[tuple[str, str], ...]
    weight: int = -1


class Measurement(NamedTuple):
    """A measure, its hyperparameters and what becomes of each of its outputs."""

    measure: Measure
    values: dict[str, Number]
    outputs: tuple[Output, ...]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The fields that every loss has.

    Numbers may be Python numbers or scalar arrays; none of them is part of the compiled program.

    >>> from duohead import ZLoss
    >>> ZLoss(weight=1e-4, reduction="constant", denominator=4096.0).weight
    0.0001
    """

    type: ClassVar[str] = ""
    rules: ClassVar[tuple[Rule, ...]] = ()
    #: metrics that the type can report, for the docs
    metric_names: ClassVar[tuple[str, ...]] = ()
    negative_weight: ClassVar[bool] = False
    #: a sequence term's value counts at each of the sequence's tokens (GSPO), not once per sequence (KTO)
    carried_by_tokens: ClassVar[bool] = True
    #: fields that one choice alone uses
    only_with: ClassVar[tuple[OnlyWith, ...]] = (OnlyWith("denominator", "reduction", "constant", True),)

    weight: Number = number(1.0, "factor of this loss in the total", minimum=0.0)
    logits_scale_factor: Number = number(1.0, "multiplies the head's own logits scale for this loss", above=0.0)
    reduction: str = choice("token_mean", "how tokens become one scalar", REDUCTIONS)
    denominator: Number = number(None, "divisor of the `constant` reduction", above=0.0, optional=True)

    def __post_init__(self) -> None:
        for rule in self.rules:
            rule.check(getattr(self, rule.name), "")
        for field, other, value, required in self.only_with:
            chosen, given = getattr(self, other), getattr(self, field) is not None
            if required and chosen == value and not given:
                raise ValueError(f"{field}: the `{value}` {other} needs one, a number > 0")
            if given and chosen != value:
                raise ValueError(f"{field}: only the `{value}` {other} uses it, {other} is {chosen!r}")

    @property
    def student_scale(self) -> tuple[Number, Number]:
        """(loss scale, student temperature): losses that agree in both share one softmax."""
        return (self.logits_scale_factor, 1.0)

    @property
    def teacher(self) -> tuple[str, Number] | None:
        """(reference model, temperature) of the teacher's softmax, where the loss has one."""
        return None

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        """The loss's terms, for a call in which the inputs ``given`` are present."""
        raise NotImplementedError

    def measurements(self, given: frozenset[str]) -> tuple[Measurement, ...]:
        """The loss's metrics beyond its value."""
        return ()

    def counts(self, given: frozenset[str]) -> tuple[str, ...]:
        """Counts reported as metrics: ``num_tokens``, ``num_segments``."""
        return ()

    @property
    def reference(self) -> str | None:
        """The name under which a mapping of ``ref_logprobs`` holds this loss's reference, if it has one."""
        return None


#: type name → spec class, open to users' own
LOSS_TYPES: dict[str, type[Loss]] = {}
_AnyLoss = TypeVar("_AnyLoss", bound=type[Loss])


#: every declared spec class, and who is told of each (JAX makes them pytrees)
_DECLARED: list[type[Loss]] = []
_LISTENERS: list[Callable[[type[Loss]], None]] = []


def declare(cls: type[Loss], type_name: str) -> None:
    """Collects a spec class's rules and tells the adapters of it."""
    cls.type = type_name
    cls.rules = tuple(
        _without_minimum(rule) if rule.name == "weight" and cls.negative_weight else rule for rule in rules_of(cls)
    )
    _DECLARED.append(cls)
    for listener in _LISTENERS:
        listener(cls)


def on_declared(listener: Callable[[type[Loss]], None]) -> None:
    """Calls ``listener`` with every spec class, those declared already and those to come."""
    _LISTENERS.append(listener)
    for cls in _DECLARED:
        listener(cls)


def register(type_name: str) -> Callable[[_AnyLoss], _AnyLoss]:
    """Class decorator: makes a spec class the loss ``type_name`` of configurations.

    Raises:
        ValueError: the name is taken or no name at all.
        TypeError: the decorators are in the wrong order.

    >>> register("z_loss")(Loss)
    Traceback (most recent call last):
    ValueError: a loss type 'z_loss' is registered already: ZLoss
    """

    def add(cls: _AnyLoss) -> _AnyLoss:
        if not isinstance(type_name, str) or not type_name or type_name == "monolithic":
            raise ValueError(f"a loss type is a non-empty name other than 'monolithic' (a group), got {type_name!r}")
        forgotten = [name for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)]
        if forgotten:
            raise TypeError(
                f"{cls.__name__}: put @dataclass(frozen=True, kw_only=True) below @register, "
                f"or its fields ({', '.join(forgotten)}) are no fields"
            )
        if type_name in LOSS_TYPES:
            raise ValueError(f"a loss type {type_name!r} is registered already: {LOSS_TYPES[type_name].__name__}")
        declare(cls, type_name)
        LOSS_TYPES[type_name] = cls
        return cls

    return add


def _without_minimum(rule: Rule) -> Rule:
    return Rule(rule.name, rule.doc + "; negative is a bonus", rule.default)
