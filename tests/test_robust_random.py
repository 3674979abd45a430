"""Random sets of losses on hard inputs: every implementation against the oracle, within derived bounds."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from robust.bounds import truth
from robust.comparing import faults
from robust.core_runs import compute_of
from robust.counting import counted
from robust.implementations import FAST, IMPLEMENTATIONS, TRITON
from robust.strategies import Example, examples

#: examples for each cheap implementation; ROBUST_EXAMPLES draws more
EXAMPLES = int(os.environ.get("ROBUST_EXAMPLES", "150"))
#: op by op, JAX compiles each operation once for each shape
JAX_SHAPES = ((3, 2), (4, 5))


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


@pytest.mark.parametrize("name", [name for name in FAST if not name.startswith("jax")])
def test_random_sets(name: str, record_property: Callable[[str, Any], None]) -> None:
    with counted(record_property) as counts:

        @steady(EXAMPLES)
        @given(examples())
        def check(example: Example) -> None:
            counts["drawn"] += 1
            assert not wrong(name, example)

        check()


@pytest.mark.parametrize("name", [name for name in FAST if name.startswith("jax")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_sets_jax(name: str, dtype: str, record_property: Callable[[str, Any], None]) -> None:
    with counted(record_property) as counts:

        @steady(EXAMPLES // 3)
        @given(examples(shapes=JAX_SHAPES, dtypes=(dtype,)))
        def check(example: Example) -> None:
            counts["drawn"] += 1
            assert not wrong(name, example)

        check()


@pytest.mark.skipif(not TRITON, reason="the interpreter has a process of its own: TRITON_INTERPRET=1")
def test_random_sets_triton(record_property: Callable[[str, Any], None]) -> None:
    token_types = ("label", "z_loss", "entropy", "distillation", "grpo")
    with counted(record_property) as counts:

        @steady(EXAMPLES // 5)
        @given(examples(types=token_types, dtypes=("float32", "bfloat16")))
        def check(example: Example) -> None:
            counts["drawn"] += 1
            assert not wrong("torch_triton", example)

        check()
