"""The examples in the docstrings of every public module."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import duohead
import duohead_jax
import duohead_torch

MODULES = sorted(
    info.name
    for package in (duohead, duohead_torch, duohead_jax)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


def test_there_are_examples_of_every_public_name() -> None:
    """Every public function and loss has an example."""
    for package in (duohead, duohead_torch, duohead_jax):
        for name in package.__all__:
            item = getattr(package, name)
            if isinstance(item, type) or callable(item):
                assert ">>>" in (item.__doc__ or ""), f"{package.__name__}.{name} has no example"


@pytest.mark.parametrize("name", [*MODULES, "duohead", "duohead_torch", "duohead_jax"])
def test_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in ("triton", "jax_triton", "tqdm", "matplotlib"):
            pytest.skip(f"{error.name} is an optional extra")
        raise
    assert doctest.testmod(module).failed == 0
