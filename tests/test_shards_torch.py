"""Vocabulary shards in PyTorch: 2, 3 and 4 gloo processes, each group started once and running all its checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 900
HERE = Path(__file__).parent


def names(ranks: int) -> list[str]:
    """The checks for a number of ranks, read from the source so that collecting tests imports no torch."""
    found, allowed = [], None
    for line in (HERE / "shards_torch.py").read_text().splitlines():
        if line.startswith("@check("):
            allowed = [int(number) for number in line[7:-1].split(",") if number]
        elif line.startswith("def ") and allowed is not None:
            if not allowed or ranks in allowed:
                found.append(line[4 : line.index("(")])
            allowed = None
    return found


def start(rank: int, ranks: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"}
    if ranks == 3:  # the group of three compiles nothing, so the kernel's interpreter may be on
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(HERE / "shards_torch.py"), str(rank), str(ranks)]
    command += [str(folder / "rendezvous"), str(folder / f"{rank}.json")]
    with (folder / f"{rank}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


Outcome = tuple[int, list[dict[str, str]]]


@pytest.fixture(scope="module", params=[2, 3, 4])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What each rank found, check by check; every process has ended when this returns."""
    ranks = request.param
    folder = tmp_path_factory.mktemp(f"ranks{ranks}")
    processes = [start(rank, ranks, folder) for rank in range(ranks)]
    try:
        for process in processes:
            process.wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = []
    for rank, process in enumerate(processes):
        log, results = (folder / f"{rank}.log").read_text(), folder / f"{rank}.json"
        assert results.exists(), f"rank {rank} ended with {process.returncode} and no results:\n{log[-4000:]}"
        found.append(json.loads(results.read_text()))
    return ranks, found


@pytest.mark.parametrize("name", sorted({name for ranks in (2, 3, 4) for name in names(ranks)}))
def test_shards(outcome: Outcome, name: str) -> None:
    ranks, found = outcome
    if name not in names(ranks):
        assert all(name not in item for item in found)
        return
    failures = [item.get(name, "did not run: an earlier check failed") for item in found if item.get(name, "-")]
    assert not failures, "\n".join(failures)
