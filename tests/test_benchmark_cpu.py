"""The CPU benchmark at a tiny size: it runs, both ways give the same, and its page has what was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_whole_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [sys.executable, str(BENCHMARKS / "cpu.py"), "--tokens", "16", "--vocab", "500", "--repeats", "3"]
    done = subprocess.run([*command, "--frameworks", "jax", "--write", str(page)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.strip() == done.stdout.strip()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| jax")]
    assert len(rows) == 2
    ratios = {row[0].strip("| "): row[2] for row in rows}
    assert ratios["jax monolithic"] == "1.00×"
    assert float(ratios["jax per_loss"].removesuffix("×")) > 0


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_both_ways_compute_the_same(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cpu

    make = cpu.torch_call if framework == "torch" else cpu.jax_call
    found = {how: make(how, 8, 50)() for how in ("monolithic", "per_loss")}
    (whole, _), gradient = found["monolithic"]
    total, added = found["per_loss"]
    np.testing.assert_allclose(float(total), float(whole), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(added), np.asarray(gradient), rtol=1e-5, atol=1e-8)
