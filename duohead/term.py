"""Terms: losses as small pure functions whose parameters name what they need.

A parameter of a term is one of

* a row statistic (``logprob``, ``lse``, ``entropy``, ``mean_logprob``, ``teacher_cross_entropy``, ``forward_kl``,
  ``reverse_kl``, ``jsd``, and ``is_top``, which has no derivative),
* a per-token input (``advantages``, ``old_logprobs``, ``ref_logprobs``, ``importance_weights``),
* a sequence quantity: ``length``, or ``<what>_sum`` / ``<what>_mean`` of ``logprob``, ``lse``, ``entropy``,
  ``mean_logprob``, ``log_ratio`` (logprob - old_logprobs), ``ref_log_ratio`` (logprob - ref_logprobs),
  ``advantages``, ``importance_weights``,
* in a pair term the same with ``chosen_`` or ``rejected_`` before it,
* and any other name is a hyperparameter, a runtime value.

It returns ``(value, d value / d first statistic, ...)`` in the order of its differentiable parameters, or the
value alone: then the framework's automatic differentiation supplies the derivatives.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from duohead.bind import bind

STATISTICS = ("logprob", "lse", "entropy", "mean_logprob")
TEACHER_STATISTICS = ("teacher_cross_entropy", "forward_kl", "reverse_kl", "jsd")
INPUTS = ("advantages", "old_logprobs", "ref_logprobs", "importance_weights")
SUMMED = (*STATISTICS, "log_ratio", "ref_log_ratio", "advantages", "importance_weights")
_DIFFERENTIABLE_SUMS = (*STATISTICS, "log_ratio", "ref_log_ratio")


def sequence_quantity(name: str) -> tuple[str, str] | None:
    """``"logprob_sum"`` → ``("logprob", "sum")``; None where the name is no sequence quantity."""
    if name == "length":
        return ("length", "sum")
    what, _, how = name.rpartition("_")
    return (what, how) if how in ("sum", "mean") and what in SUMMED else None


def pair_quantity(name: str) -> tuple[str, str] | None:
    """``"chosen_logprob_sum"`` → ``("chosen", "logprob_sum")``; None where the name is no pair quantity."""
    side, _, quantity = name.partition("_")
    return (side, quantity) if side in ("chosen", "rejected") and sequence_quantity(quantity) else None


def is_differentiable(name: str) -> bool:
    """Whether a term gives a derivative for the operand of this name."""
    if name in STATISTICS or name in TEACHER_STATISTICS:
        return True
    pair = pair_quantity(name)
    quantity = sequence_quantity(pair[1] if pair else name)
    return quantity is not None and quantity[0] in _DIFFERENTIABLE_SUMS


class Bound:
    """A restricted function with a copy bound to every framework that has been imported."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not isinstance(function, types.FunctionType):
            raise TypeError(f"a term is a plain function, got {function!r}")
        self.function = function
        self.name = function.__name__
        self.bound: dict[str, Callable[..., Any]] = {}
        for namespace, names in NAMESPACES.items():
            self.bound[namespace] = bind(function, names)
        #: its place among all of them, by which ``numbered`` finds it again
        self.number = len(_BOUND)
        _BOUND.append(self)


class Term(Bound):
    """A pure function together with what its parameters mean."""

    def __init__(self, function: Callable[..., Any], operands: Mapping[str, str] | None = None) -> None:
        super().__init__(function)
        #: parameter → the operand it stands for (itself unless renamed)
        self.operands: dict[str, str] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                raise TypeError(f"term {self.name}: parameter {parameter.name!r} must be a plain positional one")
            self.operands[parameter.name] = (operands or {}).get(parameter.name, parameter.name)
        self.kind = _kind(self.name, tuple(self.operands.values()))
        self.differentiable = tuple(
            parameter for parameter, operand in self.operands.items() if is_differentiable(operand)
        )
        self.hyperparameters = tuple(parameter for parameter, operand in self.operands.items() if not _is_data(operand))
        self.has_derivatives = self._probe()

    def _probe(self) -> bool:
        """Runs the term once under NumPy: is the result a value, or a value and its derivatives?"""
        arguments = [np.float64(0.5)] * len(self.operands)
        with np.errstate(all="ignore"):
            result = self.bound["numpy"](*arguments)
        if result is None:
            raise TypeError(
                f"term {self.name} returns nothing: it should return its value, or (value, derivatives ...)"
            )
        if not isinstance(result, tuple):
            return False
        if len(result) != 1 + len(self.differentiable):
            raise TypeError(
                f"term {self.name} returns {len(result)} values: it should return its value and "
                f"{len(self.differentiable)} derivatives, with respect to {', '.join(self.differentiable) or 'nothing'}"
            )
        return True

    def __repr__(self) -> str:
        return f"<{self.kind} term {self.name}({', '.join(self.operands)})>"


class Measure(Bound):
    """A pure function from operands to several per-token (or per-pair) quantities that metrics are made of."""

    def __init__(self, function: Callable[..., Any], operands: Mapping[str, str] | None = None) -> None:
        super().__init__(function)
        parameters = inspect.signature(function).parameters
        self.operands = {name: (operands or {}).get(name, name) for name in parameters}
        self.kind = _kind(self.name, tuple(self.operands.values()))


def _is_data(operand: str) -> bool:
    return (
        operand in STATISTICS
        or operand in TEACHER_STATISTICS
        or operand in INPUTS
        or operand == "is_top"
        or sequence_quantity(operand.removeprefix("carried_")) is not None
        or pair_quantity(operand) is not None
    )


def _kind(name: str, operands: tuple[str, ...]) -> str:
    pair = [operand for operand in operands if pair_quantity(operand)]
    sequence = [operand for operand in operands if sequence_quantity(operand)]
    token = [
        operand
        for operand in operands
        if _is_data(operand) and not pair_quantity(operand) and not sequence_quantity(operand)
    ]
    kinds = [kind for kind, found in (("pair", pair), ("sequence", sequence), ("token", token)) if found]
    if len(kinds) != 1:
        raise TypeError(
            f"term {name} must take operands of one kind: token ({token}), sequence ({sequence}) or pair ({pair})"
        )
    return kinds[0]


def _numpy_sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


NUMPY_NAMES: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "log": np.log,
    "where": np.where,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "sigmoid": _numpy_sigmoid,
}

#: namespace → its functions, for every framework that has been imported
NAMESPACES: dict[str, Mapping[str, Any]] = {"numpy": NUMPY_NAMES}
_BOUND: list[Bound] = []


def numbered(number: int) -> Bound:
    """The restricted function with this number."""
    return _BOUND[number]


def add_namespace(name: str, names: Mapping[str, Any]) -> None:
    """Binds every restricted function, those already made and those to come, to one more framework."""
    NAMESPACES[name] = names
    for item in _BOUND:
        item.bound[name] = bind(item.function, names)  # type: ignore[arg-type]
