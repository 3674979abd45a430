"""Only for a process with TRITON_INTERPRET=1 (tests/test_triton_interpreter.py starts it): kernels run on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    import torch

    from duohead.kernels import launch

    @pytest.fixture(autouse=True)
    def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Tiles of 256 columns, so that a few hundred columns are several; whatever is allocated begins as NaN."""
        monkeypatch.setattr(launch, "override", launch.Shape(warps=1, unroll=1, ahead=False))
        torch.use_deterministic_algorithms(True)
        assert torch.empty(3).isnan().all()
        yield
        torch.use_deterministic_algorithms(False)
