"""The project's own files: pins, the Makefile's promises, and the loss that CONTRIBUTING.md adds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from duohead import HeadSpec, parity
from duohead.loss import LOSS_TYPES

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+?)(?:; .*)?$")


def pins() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = PIN.match(line)
            assert match, f"not a pin: {line}"
            found.setdefault(match[1].lower().replace("_", "-"), []).append(match[2])
    return found


def test_everything_that_make_installs_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(item for name in extras if name != "jax-triton" for item in extras[name])]
    names = {re.split(r"[<>=!~\[; ]", item)[0].lower().replace("_", "-") for item in wanted}
    assert names <= set(pins())


def test_the_commands_of_the_package_are_there() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for target in scripts.values():
        module, function = target.split(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function))


@pytest.mark.parametrize(
    ("target", "commands"),
    [
        ("test", ["-m pytest -n 2"]),
        ("lint", ["ruff check .", "ruff format --check .", "-m mypy"]),
        ("demo", ["examples/demo.py"]),
    ],
)
def test_make_does_what_it_says(target: str, commands: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "--dry-run", f"PYTHON={sys.executable}", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for command in commands:
        assert command in done.stdout


def test_make_says_that_no_python_was_found(tmp_path: Path) -> None:
    # The old environment of this folder, if there is one, must not answer in its place.
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("constraints.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    done = subprocess.run(["make", "PYTHON=no-such-python", "test"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no Python 3.11 or newer found" in done.stdout


def test_ci_runs_the_same_commands_on_both_pythons() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs == [".ci/run", "make parity"]
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-2:] == ["make lint", "make test"]


@pytest.fixture
def same_loss_types_after() -> Iterator[None]:
    """Takes back what a test registers."""
    before = dict(LOSS_TYPES)
    yield
    LOSS_TYPES.clear()
    LOSS_TYPES.update(before)


@pytest.mark.usefixtures("same_loss_types_after")
def test_the_loss_of_the_contributing_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "focal_of_the_page.py").write_text(source)
    config = tmp_path / "head.yaml"
    config.write_text("losses: {own: {type: focal, gamma: 1.5}, ce: {type: label, weight: 0.1}}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = [str(config), "--import", "focal_of_the_page", "--only", "torch eager", "--only", "jax xla"]
    for dtype in ("float32", "bfloat16", "float64"):
        assert parity.main([*arguments, "--dtype", dtype]) == parity.AGREE, capsys.readouterr().out
    check_derivative(HeadSpec.from_yaml(config))


def check_derivative(head: HeadSpec) -> None:
    """d value / d logprob as the page gives it, against a finite difference."""
    term = head.losses["own"].parts(frozenset())[0].term.bound["numpy"]
    for logprob in (-6.0, -1.0, -0.05):
        step = 1e-5
        difference = (term(logprob + step, 1.5)[0] - term(logprob - step, 1.5)[0]) / (2 * step)
        assert term(logprob, 1.5)[1] == pytest.approx(difference, rel=1e-6)
