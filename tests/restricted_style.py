"""Reads a term's source and says where it leaves the style that Triton's compiler takes (DESIGN §6)."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator

from duohead.namespace import NAMES, Unbound

#: an expression or statement that a term may not hold → why
FORBIDDEN: dict[type[ast.AST], str] = {
    ast.BoolOp: "`and`/`or` on values; use & and |",
    ast.Lambda: "a lambda",
    ast.Dict: "a dict",
    ast.Set: "a set",
    ast.List: "a list",
    ast.ListComp: "a comprehension",
    ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension",
    ast.GeneratorExp: "a generator",
    ast.If: "an `if`; use where",
    ast.IfExp: "an `if`; use where",
    ast.While: "a loop",
    ast.For: "a loop",
    ast.Try: "a try",
    ast.With: "a with",
    ast.Assert: "an assert",
    ast.Raise: "a raise",
    ast.Subscript: "indexing",
    ast.Attribute: "an attribute",
    ast.Starred: "a star",
    ast.JoinedStr: "an f-string",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Import: "an import",
    ast.ImportFrom: "an import",
    ast.NamedExpr: "`:=`",
}
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitAnd, ast.BitOr, ast.BitXor)


def helpers_of(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The plain functions that it calls."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            yield value


def family_of(function: types.FunctionType) -> list[types.FunctionType]:
    """A function with all that it calls, directly or not."""
    found = [function]
    for one in found:
        found += [helper for helper in helpers_of(one) if helper not in found]
    return found


def faults_of(function: types.FunctionType) -> list[str]:
    """Every place where one function, its helpers left aside, leaves the restricted style."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        return ["it is not a plain def"]
    faults = list(_faults_of_signature(function, tree))
    for statement in tree.body:
        for node in ast.walk(statement):
            faults += [f"line {node.lineno}: {fault}" for fault in _faults_of_node(function, node)]
    return faults


def _faults_of_signature(function: types.FunctionType, tree: ast.FunctionDef) -> Iterator[str]:
    arguments = tree.args
    if tree.decorator_list:
        yield "it is decorated"
    if arguments.kwonlyargs:
        yield "keyword-only parameters"
    if arguments.vararg or arguments.kwarg:
        yield "starred parameters"
    if function.__closure__ or "<locals>" in function.__qualname__:
        yield "it is not at module level"
    if any(parameter.annotation is not None for parameter in arguments.args) or tree.returns is not None:
        yield "an annotation"


def _faults_of_node(function: types.FunctionType, node: ast.AST) -> Iterator[str]:
    if type(node) in FORBIDDEN:
        yield FORBIDDEN[type(node)]
    elif isinstance(node, ast.BinOp) and not isinstance(node.op, OPERATORS):
        yield f"the operator {type(node.op).__name__}; write powers as products"
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, (ast.USub, ast.Invert)):
        yield f"the operator {type(node.op).__name__}"
    elif isinstance(node, ast.Compare) and len(node.ops) != 1:
        yield "a chained comparison"
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn, ast.Is, ast.IsNot)):
        yield f"the comparison {type(node.ops[0]).__name__}"
    elif isinstance(node, ast.FunctionDef):
        yield "a function within"
    elif isinstance(node, ast.Call):
        yield from _faults_of_call(function, node)


def _faults_of_call(function: types.FunctionType, node: ast.Call) -> Iterator[str]:
    if node.keywords:
        yield "a keyword argument"
    if not isinstance(node.func, ast.Name):
        return
    callee = function.__globals__.get(node.func.id)
    if isinstance(callee, Unbound):
        if callee.name not in NAMES:
            yield f"a call of {node.func.id}"
    elif not isinstance(callee, types.FunctionType):
        yield f"a call of {node.func.id}, which is neither of the namespace nor a helper"
