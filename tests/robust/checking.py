"""What the tests of random sets share: steady settings, and one example on one implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

from robust.bounds import truth
from robust.comparing import faults
from robust.core_runs import compute_of
from robust.implementations import IMPLEMENTATIONS
from robust.strategies import Example


def steady(count: int) -> Callable[[Any], Any]:
    """The same examples in every run, kept nowhere."""
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


def wrong(name: str, example: Example) -> list[str]:
    """What one implementation gets wrong on one example."""
    compute, dtype = compute_of(example.dtype), example.dtype
    if name.startswith("numpy"):
        compute = dtype = "float64"
    outcome = IMPLEMENTATIONS[name](example.head, example.inputs, example.dtype)
    return faults(outcome, truth(example.head, example.inputs, compute), dtype)
