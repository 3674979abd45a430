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
from duohead.term import INPUTS, Bound, Term

#: everything a call could have: a spec's terms may depend on it
_ANYTHING = frozenset((*INPUTS, "labels", "segment_ids", "preference_pairs"))


def why_not(losses: Mapping[str, Loss]) -> dict[str, str]:
    """Loss name → why the Triton kernel cannot take it; empty where it takes them all.

    >>> from duohead import CrossEntropy
    >>> why_not({"ce": CrossEntropy()})
    {}
    """
    found = {}
    for name, loss in losses.items():
        functions: list[Bound] = [part.term for part in loss.parts(_ANYTHING) if in_kernel(part.term)]
        functions += [item.measure for item in loss.measurements(_ANYTHING) if item.measure.kind == "token"]
        reasons = [reason for function in functions if (reason := fault(function)) is not None]
        if reasons:
            found[name] = reasons[0]
    return found


def refuse(losses: Mapping[str, Loss]) -> None:
    """Raises where ``implementation="triton"`` cannot take every loss."""
    for name, reason in why_not(losses).items():
        raise ValueError(
            f"implementation: 'triton' cannot take the loss {name!r} ({losses[name].type}): {reason}; "
            "use 'auto', or write the term in the restricted style"
        )


def in_kernel(term: Term) -> bool:
    """Whether a term is inlined in the kernel: others are array code between two launches."""
    return term.kind == "token" and term.has_derivatives


def is_fused(plan: Plan) -> bool:
    """Whether one launch does everything: all terms and measures per token, and with derivatives of their own."""
    parts = [part for loss in plan.losses for part in loss.parts]
    measures = [item for loss in plan.losses for item in loss.measurements]
    return (
        bool(plan.losses)
        and not plan.sums
        and all(in_kernel(part.term) for part in parts)
        and all(item.kind == "token" and not _carried(item.measure) for item in measures)
    )


def _carried(measure: Bound) -> bool:
    operands: dict[str, str] = getattr(measure, "operands", {})
    return any(operand.startswith("carried_") for operand in operands.values())


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
    if not isinstance(tree.body[0], ast.FunctionDef):
        return f"{function.__name__} is not a plain def"
    for node in ast.walk(tree):
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
    if isinstance(node, ast.FunctionDef) and node.args.kwonlyargs:
        return "has keyword-only parameters"
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
