"""Which losses the kernel takes, decided from their specs alone: when a configuration is read, before any launch."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from duohead.loss import Loss
from duohead.namespace import NAMES, Unbound
from duohead.plan import Plan
from duohead.term import INPUTS, Bound, Measure, Term

#: everything a call could have: a spec's terms may depend on it
_ANYTHING = frozenset((*INPUTS, "labels", "segment_ids", "preference_pairs"))


def why_not(losses: Mapping[str, Loss]) -> dict[str, str]:
    """Loss name → why the Triton kernel cannot take it; empty where it takes them all.

    A term of a set that runs in one launch must be in the restricted style. A set with sequence or pair terms, or with
    terms that leave their derivatives to the framework, runs in two launches over the vocabulary: between them its
    terms are kernels where all are in that style and give derivatives, else array code.

    >>> from duohead import CrossEntropy
    >>> why_not({"ce": CrossEntropy()})
    {}
    """
    functions: dict[str, list[Bound]] = {}
    for name, loss in losses.items():
        terms = [part.term for part in loss.parts(_ANYTHING)]
        measures = [item.measure for item in loss.measurements(_ANYTHING)]
        if not _one_launch(terms, measures):
            return {}
        functions[name] = [*terms, *measures]
    reasons = {name: _first_fault(found) for name, found in functions.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _first_fault(functions: list[Bound]) -> str | None:
    for function in functions:
        reason = fault(function)
        if reason is not None:
            return reason
    return None


def _one_launch(terms: list[Term], measures: list[Measure]) -> bool:
    return all(term.kind == "token" and term.has_derivatives for term in terms) and all(
        measure.kind == "token" and not any(name.startswith("carried_") for name in measure.operands.values())
        for measure in measures
    )


def refuse(losses: Mapping[str, Loss]) -> None:
    """Raises where ``implementation="triton"`` cannot take every loss."""
    for name, reason in why_not(losses).items():
        raise ValueError(
            f"implementation: 'triton' cannot take the loss {name!r} ({losses[name].type}): {reason}; "
            "use 'auto', or write the term in the restricted style"
        )


@functools.lru_cache(maxsize=256)
def plan_fault(plan: Plan) -> tuple[str, str] | None:
    """(loss, why the kernel cannot take it) of the first such loss of a plan, or None."""
    if not is_fused(plan):
        return None
    for loss in plan.losses:
        functions: list[Bound] = [part.term for part in loss.parts]
        reason = _first_fault([*functions, *(item.measure for item in loss.measurements)])
        if reason is not None:
            return loss.name, reason
    return None


@functools.lru_cache(maxsize=256)
def is_fused(plan: Plan) -> bool:
    """Whether one launch does everything: all terms and measures per token, and with derivatives of their own."""
    terms = [part.term for loss in plan.losses for part in loss.parts]
    measures = [item.measure for loss in plan.losses for item in loss.measurements]
    return bool(plan.losses) and not plan.sums and _one_launch(terms, measures)


@functools.lru_cache(maxsize=256)
def is_sequenced(plan: Plan) -> bool:
    """Whether kernels do everything in two launches over the vocabulary, terms over sequences and pairs too."""
    if is_fused(plan) or not plan.needs_segments:
        return False
    terms = [part.term for loss in plan.losses for part in loss.parts]
    measures = [item.measure for loss in plan.losses for item in loss.measurements]
    return all(term.has_derivatives for term in terms) and _first_fault([*terms, *measures]) is None


@functools.lru_cache(maxsize=1024)
def fault(item: Bound) -> str | None:
    """What in a term's source Triton's compiler would not take, or None."""
    return _function_fault(item.function, set())


def _function_fault(function: Any, seen: set[Any]) -> str | None:
    if function in seen:
        return None
    seen.add(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return f"the source of {function.__name__} cannot be read"
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return f"{function.__name__} is not a plain def"
    if definition.args.kwonlyargs:
        return f"{function.__name__} has keyword-only parameters"
    if not all(isinstance(default, ast.Constant) for default in definition.args.defaults):
        return f"{function.__name__} has a default that is no literal number: a kernel would look its name up again"
    # The body alone: decorators are none of the kernel's business.
    for node in (node for statement in definition.body for node in ast.walk(statement)):
        what = _node_fault(node, function)
        if what is not None:
            return f"{function.__name__} {what}"
    for name in function.__code__.co_names:
        helper = function.__globals__.get(name)
        if inspect.isfunction(helper):
            inner = _function_fault(helper, seen)
            if inner is not None:
                return inner
    return None


def _node_fault(node: ast.AST, function: Any) -> str | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.FloorDiv, ast.Mod, ast.MatMult)):
        return "uses **, //, % or @: write products out"
    if isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        return "uses and, or, not: use & and | on comparisons"
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        return "chains comparisons: join two with &"
    if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.For)):
        return "branches or loops: use where"
    if isinstance(node, (ast.Lambda, ast.Dict, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp, ast.Try)):
        return f"uses a {type(node).__name__}"
    if isinstance(node, ast.Call):
        return _call_fault(node, function)
    return None


def _call_fault(node: ast.Call, function: Any) -> str | None:
    if not isinstance(node.func, ast.Name):
        return "calls a method"
    target = function.__globals__.get(node.func.id)
    allowed = isinstance(target, Unbound) or inspect.isfunction(target) or isinstance(target, type)
    if not allowed:
        return f"calls {node.func.id}: a term may call {', '.join(NAMES)} of duohead.namespace, and helpers"
    return None
