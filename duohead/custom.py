"""Losses of a user's own: a plain function becomes a loss type like the built-in ones.

The function's parameters name what it needs (``duohead.term`` lists the operands); all others are hyperparameters.
It uses plain arithmetic and the functions of ``duohead.namespace``, and runs on every implementation.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple

from duohead.fields import Number, choice, number, text
from duohead.loss import Loss, Part, declare
from duohead.loss import register as register_type
from duohead.term import (
    INPUTS,
    STATISTICS,
    SUMMED,
    TEACHER_STATISTICS,
    Term,
    is_differentiable,
)
from duohead.terms.preference import PAIR_REDUCTION, PAIR_REDUCTIONS, SEQUENCE_REDUCTION, SEQUENCE_REDUCTIONS

_TOKEN = (*STATISTICS, *TEACHER_STATISTICS, "is_top", *INPUTS)
_SEQUENCE = ("length", *(f"{what}_{how}" for what in SUMMED for how in ("sum", "mean")))
_PAIR = tuple(f"{side}_{quantity}" for side in ("chosen", "rejected") for quantity in _SEQUENCE)
_OPERANDS = {"token": _TOKEN, "sequence": _SEQUENCE, "pair": _PAIR}
#: builtins that go wrong on arrays or in a kernel, and what to use instead
_INSTEAD = {"abs": "abs", "min": "minimum", "max": "maximum", "pow": "exp and log", "sum": "+", "round": "where"}
_NOT_IN_A_TERM = (*_INSTEAD, "float", "int", "bool", "len", "range", "print", "getattr", "isinstance")


@dataclass(frozen=True, kw_only=True)
class CustomLoss(Loss):
    """What the losses of a user's own share; ``term`` is the bound function."""

    term: ClassVar[Term]
    needs_teacher: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    #: the fields whose values go to the term, or with it to the statistic ``jsd``
    numbers: ClassVar[tuple[str, ...]] = ()
    required: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self.required:
            if getattr(self, name) is None:
                raise TypeError(f"{name}: {self.type} needs this hyperparameter, a number; none was given")
        super().__post_init__()

    @property
    def student_scale(self) -> tuple[Number, Number]:
        return (self.logits_scale_factor, self.student_temperature if self.needs_teacher else 1.0)  # type: ignore[attr-defined]

    @property
    def teacher(self) -> tuple[str, Number] | None:
        return (self.reference_model, self.temperature) if self.needs_teacher else None  # type: ignore[attr-defined]

    @property
    def reference(self) -> str | None:
        return self.reference_model if self.needs_reference else None  # type: ignore[attr-defined]

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        return (Part(self.term, {name: getattr(self, name) for name in self.numbers}),)


def token_loss(
    function: Callable[..., Any] | None = None,
    *,
    register: str | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
) -> Any:
    """Decorator: a function of one token's statistics and inputs becomes a loss type.

    Its parameters are among ``logprob``, ``lse``, ``entropy``, ``mean_logprob``, ``is_top``; with a teacher
    ``teacher_cross_entropy``, ``forward_kl``, ``reverse_kl``, ``jsd``; and the inputs ``advantages``, ``old_logprobs``,
    ``ref_logprobs``, ``importance_weights``. All are per token and in nats. Any other parameter is a hyperparameter, a
    runtime number, with the signature's default.

    It returns ``(value, d value / d statistic, …)``, the derivatives in the order of its statistics, or the value
    alone: then automatic differentiation supplies them.

    Args:
        register: the loss's type in configurations.
        hyperparameters: name → ``duohead.fields.number(…)``, which declares a default, a range and a meaning.

    Raises:
        TypeError: a parameter that is no operand of a token, a closure, a global that a term may not use, or a
            wrong number of derivatives; the message says which.

    >>> from duohead.namespace import exp
    >>> @token_loss
    ... def unlikely(logprob, bound=0.1):
    ...     return exp(logprob) - bound, exp(logprob)
    >>> unlikely(bound=0.2, weight=0.5).bound
    0.2
    """
    return _decorate(function, _Kind("token", True, register, hyperparameters or {}))


def sequence_loss(
    function: Callable[..., Any] | None = None,
    *,
    register: str | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    carried_by_tokens: bool = False,
) -> Any:
    """Decorator: a function of one sequence's sums and means becomes a loss type. It needs ``segment_ids``.

    Its parameters are ``length`` and ``<what>_sum`` or ``<what>_mean`` of ``logprob``, ``lse``, ``entropy``,
    ``mean_logprob``, ``log_ratio`` (log p − old_logprobs), ``ref_log_ratio`` (log p − ref_logprobs), ``advantages``,
    ``importance_weights``; the rest is as for ``token_loss``.

    Args:
        register, hyperparameters: as for ``token_loss``.
        carried_by_tokens: False: each sequence counts once, and ``token_mean`` is the mean over sequences (as KTO).
            True: each token carries its sequence's value, and the reductions weight tokens (as GSPO).

    Raises:
        TypeError: as for ``token_loss``.

    >>> @sequence_loss
    ... def brevity(logprob_mean, length, target):
    ...     return -logprob_mean * target / length, -target / length
    >>> brevity(target=8.0).reduction
    'token_mean'
    """
    return _decorate(function, _Kind("sequence", carried_by_tokens, register, hyperparameters or {}))


def pair_loss(
    function: Callable[..., Any] | None = None,
    *,
    register: str | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
) -> Any:
    """Decorator: a function of the two sequences of a preference pair becomes a loss type.

    Its parameters are those of ``sequence_loss`` with ``chosen_`` or ``rejected_`` before them. It needs
    ``segment_ids`` and ``preference_pairs``; ``token_mean`` is the mean over pairs.

    Args:
        register, hyperparameters: as for ``token_loss``.

    Raises:
        TypeError: as for ``token_loss``.

    >>> from duohead.namespace import maximum
    >>> @pair_loss
    ... def margin(chosen_logprob_mean, rejected_logprob_mean, gap=1.0):
    ...     return maximum(gap - chosen_logprob_mean + rejected_logprob_mean, 0.0)
    >>> margin(gap=0.5).term.has_derivatives
    False
    """
    return _decorate(function, _Kind("pair", True, register, hyperparameters or {}))


class _Kind(NamedTuple):
    """What a decorator was told."""

    name: str
    carried_by_tokens: bool
    register: str | None
    hyperparameters: Mapping[str, Any]


def _decorate(function: Callable[..., Any] | None, kind: _Kind) -> Any:
    if function is not None:
        return _loss_type(function, kind)

    def decorator(decorated: Callable[..., Any]) -> Any:
        return _loss_type(decorated, kind)

    return decorator


def _loss_type(function: Any, kind: _Kind) -> type[CustomLoss]:
    """The dataclass of a function's hyperparameters."""
    where = f"@{kind.name}_loss {getattr(function, '__name__', function)}"
    if not isinstance(function, types.FunctionType) or not function.__name__.isidentifier():
        raise TypeError(f"{where}: must be a plain function with a name (def), got {function!r}")
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        _check_parameter(parameter, kind, where)
    if not any(is_differentiable(name) for name in parameters):
        raise TypeError(f"{where}: has no parameter that depends on the logits, such as {_OPERANDS[kind.name][:3]}")
    _check_builtins(function, where, set())
    term = Term(_without_defaults(function))
    for name in kind.hyperparameters:
        if name not in term.hyperparameters:
            known = ", ".join(term.hyperparameters) or "none"
            raise TypeError(f"{where}: hyperparameters: {name!r} is no hyperparameter of it, these are: {known}")
    fields = {name: _field(parameters[name], kind, where) for name in term.hyperparameters}
    if "jsd" in parameters:
        fields["jsd_beta"] = _jsd_beta(parameters.get("jsd_beta"))
    needs_teacher = any(name in TEACHER_STATISTICS for name in parameters)
    needs_reference = any("ref_log" in name for name in parameters if name not in fields)
    attributes = {
        "term": term,
        "carried_by_tokens": kind.carried_by_tokens,
        "needs_teacher": needs_teacher,
        "needs_reference": needs_reference,
        "numbers": tuple(fields),
        "required": tuple(name for name, field in fields.items() if field.default is None),
        "__doc__": function.__doc__,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
    }
    fields |= _extra_fields(kind, needs_teacher, needs_reference)
    made = dataclasses.make_dataclass(
        function.__name__,
        [(name, Any, field) for name, field in fields.items()],
        bases=(CustomLoss,),
        namespace=attributes,
        frozen=True,
        kw_only=True,
    )
    made.__module__ = function.__module__  # make_dataclass sets its caller's
    if kind.register is None:
        declare(made, function.__name__)
    else:
        register_type(kind.register)(made)
    return made


def _check_parameter(parameter: inspect.Parameter, kind: _Kind, where: str) -> None:
    """An operand of this kind, or a hyperparameter whose name could not be meant as an operand."""
    name, mine = parameter.name, _OPERANDS[kind.name]
    if name in mine or name in kind.hyperparameters:
        return
    for other, operands in _OPERANDS.items():
        if name in operands:
            raise TypeError(f"{where}: parameter {name!r} is an operand of a {other}: use @{other}_loss")
    if hasattr(CustomLoss, name) or name in [field.name for field in dataclasses.fields(CustomLoss)]:
        raise TypeError(f"{where}: parameter {name!r} has the name of something that every loss has; rename it")
    reserved = name.startswith(("chosen_", "rejected_", "carried_")) or name.endswith(("_sum", "_mean"))
    near = get_close_matches(name, mine, 1, 0.85)
    if reserved or (near and parameter.default is inspect.Parameter.empty):
        meant = f"; did you mean {near[0]!r}?" if near else f"; a {kind.name}'s operands: {', '.join(mine)}"
        raise TypeError(
            f"{where}: parameter {name!r} is no operand of a {kind.name}{meant} (a hyperparameter needs another name"
            f"{'' if reserved else ', or a default'})"
        )


def _check_builtins(function: types.FunctionType, where: str, seen: set[types.FunctionType]) -> None:
    """Refuses builtins that are wrong on arrays, in the function and in its helpers."""
    seen.add(function)
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and value not in seen:
            _check_builtins(value, where, seen)
        elif name in _NOT_IN_A_TERM and value in (None, getattr(builtins, name)):
            instead = f"; use {_INSTEAD[name]} (from duohead.namespace)" if name in _INSTEAD else ""
            raise TypeError(f"{where}: {function.__name__} uses the builtin {name!r}{instead}")


def _without_defaults(function: types.FunctionType) -> types.FunctionType:
    """The same code with every parameter required: defaults are the dataclass's affair."""
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
    return copy


def _field(parameter: inspect.Parameter, kind: _Kind, where: str) -> Any:
    declared, default = kind.hyperparameters.get(parameter.name), parameter.default
    if declared is not None:
        rule = declared.metadata.get("rule") if isinstance(declared, dataclasses.Field) else None
        if rule is None or rule.choices or rule.text or rule.optional:
            raise TypeError(f"{where}: hyperparameters: {parameter.name!r} must be duohead.fields.number(...)")
        if default is not inspect.Parameter.empty:
            raise TypeError(f"{where}: {parameter.name!r} has a default in the signature and in hyperparameters")
        return declared
    if default is inspect.Parameter.empty:
        return number(None, f"hyperparameter of {where.split()[-1]}")
    if not isinstance(default, (int, float)) or isinstance(default, bool):
        raise TypeError(
            f"{where}: the default of {parameter.name!r} must be a number, got {default!r} "
            f"(a range is declared with hyperparameters={{{parameter.name!r}: duohead.fields.number(...)}})"
        )
    return number(default, f"hyperparameter of {where.split()[-1]}")


def _extra_fields(kind: _Kind, needs_teacher: bool, needs_reference: bool) -> dict[str, Any]:
    """The fields that the operands bring with them: those of ``Distillation``, ``GRPO``, ``DPO`` and ``KTO``."""
    fields: dict[str, Any] = {}
    if kind.name == "pair":
        fields["reduction"] = choice("token_mean", PAIR_REDUCTION, PAIR_REDUCTIONS)
    elif kind.name == "sequence" and not kind.carried_by_tokens:
        fields["reduction"] = choice("token_mean", SEQUENCE_REDUCTION, SEQUENCE_REDUCTIONS)
    if needs_teacher:
        fields["reference_model"] = text("teacher", "the name of the teacher in `teacher_logits`")
        fields["temperature"] = number(1.0, "T, divides the teacher's scaled logits", above=0.0)
        fields["student_temperature"] = number(1.0, "T_s, divides the student's scaled logits", above=0.0)
    elif needs_reference:
        what = "the name of the reference where `ref_logprobs` is a mapping"
        fields["reference_model"] = text(None, what, optional=True)
    return fields


def _jsd_beta(parameter: inspect.Parameter | None) -> Any:
    """At 0 and 1 the statistic is no JSD any more: those are ``forward_kl`` and ``reverse_kl``."""
    default = 0.5 if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
    return number(default, "β, the teacher's weight in the mixture of `jsd`", above=0.0, below=1.0)
