"""Random sets of losses on hard inputs: every implementation against the oracle, within derived bounds."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from robust import quick_checks
from robust.checking import steady, wrong
from robust.counting import counted
from robust.implementations import FAST, SLOW
from robust.strategies import Example, examples

#: examples for each cheap implementation; ROBUST_EXAMPLES draws more
EXAMPLES = int(os.environ.get("ROBUST_EXAMPLES", "150"))
#: op by op, JAX compiles each operation once for each shape
JAX_SHAPES = ((3, 2), (4, 5))


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


@pytest.mark.parametrize("name", list(SLOW))
@pytest.mark.parametrize("example", ["hard float32", "capped bfloat16"])
def test_compiled_programs(name: str, example: str) -> None:
    """Every family of loss in one program, on a chosen few: each compiles for seconds."""
    head, inputs, dtype = next(rest for title, *rest in quick_checks.examples() if title == example)
    assert not wrong(name, Example(head, quick_checks.rounded(inputs, dtype), dtype))
