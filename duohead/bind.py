"""Binds a term to a namespace: the same code object, with globals of its own.

``bind(term, {"exp": torch.exp, ...})`` copies the function (``types.FunctionType``) so that its global names
mean the target framework's functions. Helpers of the same module that it calls are bound with it.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Mapping
from typing import Any

from duohead.namespace import NAMES, Unbound


class BindError(TypeError):
    """A term uses a name that the restricted style does not allow."""


def _keep(value: Any) -> Any:
    return value


def bind(
    function: types.FunctionType,
    names: Mapping[str, Any],
    *,
    wrap_function: Callable[[types.FunctionType], Any] = _keep,
    wrap_constant: Callable[[float], Any] = _keep,
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """A copy of ``function`` whose namespace placeholders are the functions in ``names``.

    ``wrap_function`` is applied to each bound copy (Triton: ``triton.jit``), ``wrap_constant`` to each
    module-level number (Triton: ``tl.constexpr``), and ``extra`` is added to the copies' globals.

    Raises:
        BindError: for closures, and for globals that are not namespace functions, numbers, NamedTuple
            classes or plain functions.
    """
    return _bind(function, names, wrap_function, wrap_constant, dict(extra or {}), {})


def _bind(
    function: types.FunctionType,
    names: Mapping[str, Any],
    wrap_function: Callable[[types.FunctionType], Any],
    wrap_constant: Callable[[float], Any],
    extra: dict[str, Any],
    done: dict[types.FunctionType, Any],
) -> Any:
    if function in done:
        return done[function]
    where_it_is = f"{function.__module__}.{function.__qualname__}"
    if function.__closure__:
        raise BindError(
            f"term {where_it_is} closes over {function.__code__.co_freevars}: pass them as parameters instead"
        )
    # No __name__ among the globals: Dynamo would take the copy for a function of that module.
    new_globals: dict[str, Any] = {"__builtins__": builtins, **extra}
    copy = types.FunctionType(function.__code__, new_globals, function.__name__, function.__defaults__)
    # Triton names callees by their qualified name, so that of a copy must be its origin's and unique.
    copy.__qualname__ = where_it_is.replace(".", "_")
    copy.__module__ = function.__module__
    copy.__doc__ = function.__doc__
    bound = wrap_function(copy)
    done[function] = bound
    for name in function.__code__.co_names:
        if name not in function.__globals__:
            continue  # a builtin or an attribute name
        value = function.__globals__[name]
        if isinstance(value, Unbound):
            new_globals[name] = names[value.name]
        elif isinstance(value, types.FunctionType):
            new_globals[name] = _bind(value, names, wrap_function, wrap_constant, extra, done)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            new_globals[name] = wrap_constant(value)
        elif isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            new_globals[name] = value
        else:
            raise BindError(
                f"term {where_it_is} uses {name!r}, a {type(value).__name__}: a term may use "
                f"{', '.join(NAMES)} (from duohead.namespace), module-level numbers, NamedTuples and helpers"
            )
    return bound
