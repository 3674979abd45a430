"""A small fixed set of checks of the core, with no framework: run in a fresh interpreter against a copy of duohead.

    python -m robust.quick_checks truths      # exit status 0, or 1 and what is wrong

The oracle's answers are kept in the file ``truths``: they are the same for every planted fault.

Every case file and every family of loss, whole and in shards, in float64, float32 and bfloat16, within derived bounds.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from helpers import case_names, load_case

from duohead.metrics import Mean, combine, finish_all
from robust import everyday
from robust.bounds import truth
from robust.comparing import faults
from robust.core_runs import TYPES, Float32, numpy_shards

RUNS = {
    ("whole", "float64"): numpy_shards(1),
    ("3 shards", "float64"): numpy_shards(3),
    ("whole", "float32"): numpy_shards(1, Float32()),
    ("3 shards", "float32"): numpy_shards(3, Float32()),
}


def rounded(inputs: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Every float exact in float32, logits and teachers exact in ``dtype``."""

    def convert(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: convert(key, item) for name, item in value.items()}
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            return value
        own = TYPES[dtype] if key in ("logits", "teacher_logits") else np.float32
        with np.errstate(all="ignore"):
            return value.astype(own).astype(np.float64)

    return {key: convert(key, value) for key, value in inputs.items()}


def hard_inputs() -> dict[str, Any]:
    """Equal logits of 1e8, confident rows, ratios of e^200, columns at −inf, tokens of no sequence, padding."""
    given = everyday.inputs(11, 8, 9)
    logits = given["logits"]
    logits[0] = 1e8
    logits[1] = np.where(np.arange(9) == given["labels"][1], 9.0, 0.0)
    logits[2, :2] = -np.inf
    given["labels"][2] = 4
    logits[5] = np.nan  # masked
    given["advantages"][5] = np.inf
    given["old_logprobs"][[0, 6]] = [-203.0, 150.0]
    given["advantages"][[0, 6]] = [1.0, -1.0]
    given["segment_ids"][7] = -1
    given["vocab_size"] = 8
    given["labels"] = np.where(given["labels"] == 8, 7, given["labels"])
    logits[:, 8] = 50.0
    given["teacher_logits"]["other"][4] = logits[4]
    given["num_tokens"] = 20
    return given


def examples() -> list[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """(name, head, inputs, dtype)."""
    found = []
    for name in case_names():
        case = load_case(name)
        found.append((name, case["head"], dict(case["inputs"]), case["dtype"]))
    for dtype in ("float32", "bfloat16"):
        found.append((f"everyday {dtype}", everyday.head(metrics=["entropy"]), everyday.inputs(7), dtype))
        capped = everyday.head(final_logit_softcap=3.0, logits_scale_factor=0.7)
        found.append((f"capped {dtype}", capped, everyday.inputs(8), dtype))
        found.append((f"hard {dtype}", everyday.head(), hard_inputs(), dtype))
    unweighted = {"losses": {"ce": {"type": "label"}, "z": {"type": "z_loss", "weight": 0.0}}}
    found.append(("no weight", unweighted, {"logits": np.full((2, 3), 1e30), "labels": np.array([0, 1])}, "float32"))
    return found


def questions() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any], str]]:
    """(name, compute dtype, head, inputs, dtype): every example in both compute dtypes."""
    for name, head, inputs, dtype in examples():
        inputs = rounded(inputs, dtype)
        yield name, "float64", head, inputs, "float64"
        own = "float32" if dtype == "float64" else dtype
        yield name, "float32", head, rounded(inputs, own), own


def wrong(kept: Path) -> list[str]:
    """All that is wrong, in words."""
    known = pickle.loads(kept.read_bytes()) if kept.exists() else {}
    found = []
    for name, compute, head, inputs, dtype in questions():
        if (name, compute) not in known:
            known[name, compute] = truth(head, inputs, compute)
        for how in ("whole", "3 shards"):
            here = RUNS[how, compute](head, inputs, dtype)
            found += [f"{name}, {how}, {compute}: {fault}" for fault in faults(here, known[name, compute], dtype)]
    if not kept.exists():
        kept.write_bytes(pickle.dumps(known))
    return found + wrong_metrics()


def wrong_metrics() -> list[str]:
    """Parts of unequal sizes: the whole's mean is not the mean of their means."""
    whole = finish_all(combine([{"m": Mean(1.0, 1.0)}, {"m": Mean(5.0, 3.0)}]))
    return [] if whole == {"m": 1.5} else [f"combined metrics: {whole}"]


if __name__ == "__main__":
    np.seterr(all="ignore")
    faults_found = wrong(Path(sys.argv[1]))
    for line in faults_found[:5]:
        print(line[:300])
    sys.exit(bool(faults_found))
