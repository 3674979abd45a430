"""Random sets of token losses on hard inputs through the kernel, within derived bounds.

In float32: the interpreter's conversion to bfloat16 truncates, the compiler's rounds to nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from robust.checking import steady, wrong
from robust.counting import counted
from robust.strategies import Example, examples

TYPES = ("label", "z_loss", "entropy", "distillation", "grpo")


@pytest.mark.parametrize("types", [TYPES, (*TYPES, "gspo", "dpo", "orpo", "simpo", "kto")], ids=["token", "every"])
def test_random_sets(types: tuple[str, ...], record_property: Callable[[str, Any], None]) -> None:
    with counted(record_property) as counts:

        @steady(60)
        @given(examples(types=types, dtypes=("float32",)))
        def check(example: Example) -> None:
            counts["drawn"] += 1
            assert not wrong("torch_triton", example)

        check()
