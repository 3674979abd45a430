"""Random configurations give the same scalars and gradients whatever implementation runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_inputs import assert_same, inputs_for, run_jax, run_torch
from config_strategies import heads
from hypothesis import HealthCheck, Phase, assume, given, settings

from duohead import HeadSpec

#: float32, relative
BOUND = 1e-6


def steady(count: int) -> Callable[[Any], Any]:
    """The same examples in every run, kept nowhere."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),  # a smaller example costs another compilation each
    )


def read(config: dict[str, Any]) -> HeadSpec:
    """The spec; what several losses together make invalid is not drawn."""
    try:
        return HeadSpec.from_dict(config)
    except ValueError as error:
        assume("name several references" not in str(error))
        raise


@steady(60)
@given(heads())
def test_every_drawn_head_is_read_planned_and_written(config: dict[str, Any]) -> None:
    head = read(config)
    assert HeadSpec.from_dict(head.to_dict()) == head
    for backend in ("torch", "jax"):
        report = head.plan(backend, "cpu")
        assert {name for group in report.groups for name in group.losses} == set(config["losses"])
        assert str(report).count("\n\n") >= 4


@steady(150)
@given(heads())
def test_eager_and_per_loss(config: dict[str, Any]) -> None:
    head = read(config)
    inputs = inputs_for(head)
    assert_same(run_torch(head, inputs, "eager"), run_torch(head, inputs, "per_loss"), BOUND)


@steady(6)
@given(heads())
def test_xla_and_per_loss(config: dict[str, Any]) -> None:
    head = read(config)
    inputs = inputs_for(head)
    assert_same(run_jax(head, inputs, "xla"), run_jax(head, inputs, "per_loss"), BOUND)
    assert_same(run_jax(head, inputs, "xla", "float64"), run_torch(head, inputs, "eager", "float64"), 1e-12)


def drawn(count: int) -> list[dict[str, Any]]:
    """The first configurations of the strategy that hold at least two losses."""
    found: list[dict[str, Any]] = []

    @steady(40)
    @given(heads())
    def collect(config: dict[str, Any]) -> None:
        read(config)
        if len(config["losses"]) >= 2 and len(found) < count:
            found.append(config)

    collect()
    return found


@pytest.mark.parametrize("index", range(2))
def test_auto_and_compiled(index: int) -> None:
    head = read(drawn(2)[index])
    inputs = inputs_for(head)
    expected = run_torch(head, inputs, "eager")
    auto = run_torch(head, inputs, "auto")
    assert_same(auto, expected, BOUND)
    assert_same(run_torch(head, inputs, "compiled"), expected, BOUND)
    assert np.isfinite(auto[1]).all()


IN_THE_INTERPRETER = """
from config_inputs import assert_same, inputs_for, run_torch
from test_config_random import BOUND, drawn, read

for config in drawn(6):
    head = read(config)
    inputs = inputs_for(head)
    assert_same(run_torch(head, inputs, "triton"), run_torch(head, inputs, "eager"), BOUND)
print("same")
"""


def test_triton() -> None:
    """The kernel in Triton's interpreter, which must be on before triton is imported."""
    pytest.importorskip("triton", "3.7.1", reason="older interpreters cannot run a range known at run time")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", IN_THE_INTERPRETER]
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "same\n", done.stdout + done.stderr
