"""The kernels' values without a GPU: tests/triton_interpreter, each file in a process with Triton's interpreter on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("test_torch.py", 120),
        ("test_jax.py", 20),
        ("test_custom.py", 3),
        ("test_robust.py", 2),
        ("test_sequences.py", 14),
    ],
)
def test_in_the_interpreter(file: str, least: int) -> None:
    command = [sys.executable, "-m", "pytest", str(TESTS / "triton_interpreter" / file), "-q", "-n", "0"]
    # NumPy warns where a GPU is silent: −∞ · scale overflows, and log 0 is −∞.
    command += ["-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning:triton.runtime.interpreter"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= least
