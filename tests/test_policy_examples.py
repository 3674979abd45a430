"""The policy examples in a short form: they must learn, not only run."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize(("name", "settings"), [("grpo_torch", {"implementation": "eager"}), ("grpo_jax", {})])
def test_the_reward_rises(example: Any, name: str, settings: dict[str, str]) -> None:
    curves = example(name).train(24, **settings)
    assert np.mean(curves["reward"][:3]) < 0.15  # chance is 1/16
    assert np.mean(curves["reward"][-3:]) > 0.4
    assert np.mean(curves["entropy"][-3:]) < np.mean(curves["entropy"][:3])


@pytest.mark.parametrize(("name", "settings"), [("dpo_torch", {"implementation": "eager"}), ("dpo_jax", {})])
def test_the_accuracy_rises(example: Any, name: str, settings: dict[str, str]) -> None:
    curves = example(name).train(32, **settings)
    assert curves["loss"][0] == pytest.approx(np.log(2.0), abs=1e-6)  # policy = reference
    assert np.mean(curves["accuracy"][-3:]) > 0.8
    assert np.mean(curves["accuracy"][-3:]) > np.mean(curves["accuracy"][:3]) + 0.1
    assert np.mean(curves["loss"][-3:]) < curves["loss"][0]


def test_both_frameworks_learn_the_same(example: Any) -> None:
    """The same pairs from the same weights: the curves agree to rounding."""
    curves = example("dpo_torch").train(8, implementation="eager"), example("dpo_jax").train(8)
    for name in ("loss", "margin"):
        np.testing.assert_allclose(curves[0][name], curves[1][name], rtol=1e-4, atol=1e-6)


def test_from_the_command_line(tmp_path: Path) -> None:
    picture = tmp_path / "dpo.png"
    command = [sys.executable, str(EXAMPLES / "dpo_jax.py"), "--steps", "2", "--plot", str(picture)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "step    2/2" in finished.stdout
    assert picture.exists() or "matplotlib is not installed" in finished.stdout
