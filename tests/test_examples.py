"""The examples and the demo, in short forms."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["train_torch", "train_jax"])
def test_a_training_step_trains(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    losses = example(name).main(steps=20)
    assert losses[-1] < 0.5 * losses[0]
    assert "perplexity" in capsys.readouterr().out


def test_the_demo(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--steps", "4", "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "a vocabulary of 16,384" in done.stdout
    for line in ("torch      compiled", "torch      per_loss", "jax        xla", "jax        per_loss"):
        assert line in done.stdout
    apart = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["ce"], ["z"], ["kd"])]
    assert [name for name, _ in apart] == ["ce", "z", "kd"]
    for (_, difference), size in zip(apart, (9.7, 94.0, 0.8), strict=True):
        assert float(difference) <= 3e-6 * size


def test_the_demo_takes_a_text_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = example("demo")
    seen = {}
    monkeypatch.setattr(demo, "run", lambda text, steps, picture: seen.update(text=text, steps=steps))
    file = tmp_path / "text.txt"
    file.write_text("some words\n")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--data", str(file), "--steps", "2"])
    demo.main()
    assert seen == {"text": "some words\n", "steps": 2}


def test_the_demo_refuses_no_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--steps", "0"])
    with pytest.raises(SystemExit):
        example("demo").main()
    assert "--steps: must be at least 1, got 0" in capsys.readouterr().err


def test_the_vocabulary_is_reversible_and_deterministic() -> None:
    text_module = example("demo_text")
    text = "def f(x):\n    return x ** 2  # 123 naïve ünïcode\t\n\n" * 3 + "rarely"
    vocabulary = text_module.Vocabulary(text, 256 + 12)
    assert len(vocabulary) == 256 + 12
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert (ids < 256).any()
    assert (ids >= 256).any()
    assert text_module.Vocabulary(text, 256 + 12).ids == vocabulary.ids


def test_a_label_is_the_next_token() -> None:
    tokens = np.arange(100, dtype=np.int32)
    for inputs, labels in example("demo_text").batches(tokens, 3, 2, 5, seed=0):
        np.testing.assert_array_equal(labels, inputs + 1)
    with pytest.raises(ValueError, match="the text has 100 tokens"):
        example("demo_text").batches(tokens, 1, 1, 100, seed=0)
