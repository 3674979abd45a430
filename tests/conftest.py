"""Settings that must be in place before either framework is imported."""

from __future__ import annotations

import os
from typing import Any

from robust.counting import summary as robustness_summary

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax

# float64 cases need it; tests of the default setting run in a subprocess.
jax.config.update("jax_enable_x64", True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many hard examples were drawn, and in what time."""
    line = robustness_summary([report for reports in terminalreporter.stats.values() for report in reports])
    if line is not None:
        terminalreporter.write_line(line)
