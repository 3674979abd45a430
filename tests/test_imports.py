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
