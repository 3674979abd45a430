"""The examples of vocabulary shards in a short form: each fails itself where its curve leaves the unsharded run's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    # A group of its own, so that the processes it starts end with it.
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=300)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    assert process.returncode == 0, output[-4000:]
    return output


def falls(output: str) -> bool:
    """Whether the printed loss of the sharded run has fallen by a tenth."""
    losses = [float(line.split("loss ")[1].split()[0]) for line in output.splitlines() if "loss " in line]
    half = losses[: len(losses) // 2]
    return half[-1] < 0.9 * half[0]


def test_torch_on_four_processes() -> None:
    output = run("vocab_parallel_torch.py", "6", "eager")
    assert "4 rank(s)  step   5" in output
    assert "largest difference" in output
    assert falls(output)


def test_jax_on_eight_devices() -> None:
    output = run("vocab_parallel_jax.py", "6")
    assert "8 device(s)  step   5" in output
    assert "largest difference" in output
    assert falls(output)
