"""What importing each package brings with it, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "jax", "jaxlib", "triton", "yaml")


def imported_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*(name for name in {FRAMEWORKS} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_core_imports_no_framework() -> None:
    assert imported_by("import duohead") == set()


def test_the_core_computes_without_a_framework() -> None:
    statement = (
        "import numpy, duohead.reference, duohead.numpy_namespace, duohead.engine, duohead.prepare\n"
        "found = duohead.reference.reference(numpy.zeros((1, 4)), {}, labels=numpy.array([0]))\n"
        "assert abs(found.loss - numpy.log(4)) < 1e-15"
    )
    assert imported_by(statement) == set()


@pytest.mark.parametrize(("package", "other"), [("duohead_torch", "jax"), ("duohead_jax", "torch")])
def test_adapters_never_import_each_other(package: str, other: str) -> None:
    found = imported_by(f"import {package}, sys\nassert 'duohead_{other}' not in sys.modules")
    assert other not in found
    assert package.removeprefix("duohead_") in found


@pytest.mark.parametrize("package", ["duohead_torch", "duohead_jax"])
def test_triton_is_optional(package: str) -> None:
    """torch for the CPU brings no Triton: whatever runs without kernels must import, plan and run without it."""
    make = {
        "duohead_torch": "import torch; logits, labels = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)",
        "duohead_jax": "import jax.numpy as jnp; logits, labels = jnp.zeros((2, 4)), jnp.zeros(2, int)",
    }[package]
    statement = (
        f"sys.modules['triton'] = None\nimport {package}, duohead\n{make}\n"
        f"more = {{'implementation': 'eager'}} if {package!r} == 'duohead_torch' else {{}}\n"
        f"loss = {package}.monolithic_loss(logits, {{'ce': duohead.CrossEntropy()}}, labels=labels, **more).loss\n"
        "assert abs(float(loss) - 1.3862944) < 1e-6"
    )
    found = imported_by(statement)
    assert package.removeprefix("duohead_") in found
