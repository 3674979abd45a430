"""A plan as a string and back: the form in which it passes through a compiled graph to an operator."""

from __future__ import annotations

import functools
from typing import Any

from duohead import loss as loss_module
from duohead import plan as plan_module
from duohead.plan import Plan
from duohead.term import Bound, numbered

_CLASSES = {
    cls.__name__: cls
    for cls in (
        plan_module.Plan,
        plan_module.Softmax,
        plan_module.Teacher,
        plan_module.Pairing,
        plan_module.Operand,
        plan_module.SequenceSum,
        plan_module.PlannedPart,
        plan_module.PlannedMeasurement,
        plan_module.PlannedLoss,
        loss_module.Output,
    )
}


def plan_key(plan: Plan) -> str:
    """The plan as an expression; Dynamo traces this, and what it gives is a constant of the graph."""
    return _encode(plan)


@functools.lru_cache(maxsize=256)
def plan_of(key: str) -> Plan:
    """The plan of a key, equal to that which made it."""
    found = eval(key, {"__builtins__": {}}, {**_CLASSES, "bound": numbered})
    assert isinstance(found, Plan)
    return found


def _encode(value: Any) -> str:
    if isinstance(value, Bound):
        return "bound(" + str(value.number) + ")"
    if isinstance(value, tuple):
        items = "".join([_encode(item) + "," for item in value])
        name = type(value).__name__
        return "(" + items + ")" if name == "tuple" else name + "(" + items + ")"
    return repr(value)
