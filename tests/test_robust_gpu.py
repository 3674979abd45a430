"""Random sets of losses on hard inputs through the kernel on a GPU, within derived bounds; few, for each compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from robust.checking import steady, wrong
from robust.counting import counted
from robust.strategies import Example, examples

TOKEN_TYPES = ("label", "z_loss", "entropy", "distillation", "grpo")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the interpreter's tests run everywhere")
@pytest.mark.parametrize(
    ("types", "count"),
    [(TOKEN_TYPES, 16), ((*TOKEN_TYPES, "gspo", "dpo", "orpo", "simpo", "kto"), 6)],
    ids=["token", "every"],
)
def test_random_sets(types: tuple[str, ...], count: int, record_property: Callable[[str, Any], None]) -> None:
    with counted(record_property) as counts:

        @steady(count)
        @given(examples(types=types, dtypes=("float32", "bfloat16")))
        def check(example: Example) -> None:
            counts["drawn"] += 1
            assert not wrong("torch_triton", example)

        check()
