"""``duohead-parity``: runs a head in every implementation on this machine and says whether they agree.

Meant for the CI of whoever trains one model in two frameworks: exit status 0 where PyTorch, JAX and the float64
reference agree, 1 with the reason where they do not, 2 where the question itself is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duohead.checks import FLOATS
from duohead.parity_compare import DEFAULTS, Tolerances, compare_all, faults
from duohead.parity_inputs import HALF, draw_inputs, load_inputs
from duohead.parity_report import Parity, as_json, as_text
from duohead.parity_runs import Implementation, find, run_reference
from duohead.spec import HeadSpec

AGREE, MISMATCH, BAD_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 all agree, 1 a mismatch, 2 bad usage (the reason goes to stderr)."""
    options = _parser().parse_args(arguments)
    try:
        parity = measure(options)
    except (ArithmeticError, ImportError, LookupError, NotImplementedError, OSError, TypeError, ValueError) as error:
        print(f"duohead-parity: {error}", file=sys.stderr)
        return BAD_USAGE
    print(json.dumps(as_json(parity), indent=2) if options.json else as_text(parity))
    return MISMATCH if parity.faults else AGREE


def measure(options: argparse.Namespace) -> Parity:
    """Runs what the options ask for."""
    if options.imports and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for module in options.imports:
        importlib.import_module(module)
    head = HeadSpec.from_yaml(Path(options.config))
    inputs, dtype, source = _inputs(head, options)
    tolerances = _tolerances(dtype, options)
    found = find(head, dtype, options.device)
    chosen = _chosen(found.implementations, options.only)
    present = [item for item in chosen if item.missing is None]
    if not present:
        said = ", ".join(f"{name} {what}" for name, what in found.frameworks.items())
        raise ValueError(f"nothing to run: at least one framework must be present ({said})")
    # The implementations first: what they refuse, they refuse by name.
    outcomes = [item.run(head, inputs, dtype) for item in present]
    reference = run_reference(head, inputs, found.implementations)
    against, pairs = compare_all(reference, outcomes, dtype, tolerances.places)
    allowed, between, places = tolerances
    wrong = [text for item in against for text in faults(item, allowed, allowed, dtype, places)]
    wrong += [text for item in pairs for text in faults(item, between, allowed, dtype, places)]
    return Parity(
        options.config,
        source,
        dtype,
        tuple(inputs["logits"].shape),
        found.frameworks,
        {item.name: item.missing for item in chosen if item.missing is not None},
        tolerances,
        reference,
        outcomes,
        against,
        pairs,
        wrong,
    )


def _inputs(head: HeadSpec, options: argparse.Namespace) -> tuple[dict[str, Any], str, str]:
    """(inputs, dtype, where they came from in words)."""
    if options.inputs is None:
        dtype = options.dtype or "float32"
        shape = options.shape or _default_shape(head)
        seed = 0 if options.seed is None else options.seed
        return draw_inputs(head, shape, dtype, seed), dtype, f"drawn from seed {seed}"
    for name in ("shape", "seed"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name}: is for drawn inputs, {options.inputs} has its own")
    inputs, dtype = load_inputs(Path(options.inputs), options.dtype)
    return inputs, dtype, f"from {options.inputs}"


def _default_shape(head: HeadSpec) -> tuple[int, int]:
    """Small; where the configuration has a vocabulary, its padding too."""
    if head.vocab_size is None:
        return (64, 1000)
    return (16, (head.vocab_size // 64 + 1) * 64)


def _tolerances(dtype: str, options: argparse.Namespace) -> Tolerances:
    default = DEFAULTS[dtype]
    if options.last_places is not None and dtype not in HALF:
        raise ValueError(f"--last-places: is for {' and '.join(HALF)}, the logits are {dtype}")
    return Tolerances(
        default.reference if options.tolerance is None else options.tolerance,
        default.between if options.tolerance_between is None else options.tolerance_between,
        default.places if options.last_places is None else options.last_places,
    )


def _chosen(implementations: list[Implementation], only: Sequence[str]) -> list[Implementation]:
    names = [item.name for item in implementations]
    for name in only:
        if name not in names:
            raise ValueError(f"--only: got {name!r}; on this machine: {', '.join(names) or 'nothing'}")
    return [item for item in implementations if not only or item.name in only]


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.replace("x", ",").split(","))
    if len(sizes) < 2 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"needs at least T,V, all of them 1 or more, got {text!r}")
    return sizes


def _allowed(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text!r}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="duohead-parity",
        description="Runs a head's losses in every implementation on this machine, in PyTorch and in JAX, compares "
        "values and gradients with a float64 reference and with each other, and exits 1 where they disagree.",
    )
    parser.add_argument("config", help="the head's YAML (or JSON) file")
    parser.add_argument(
        "inputs",
        nargs="?",
        help=".npz of logits, labels, mask, advantages, old_logprobs, importance_weights, segment_ids, "
        "preference_pairs, teacher_logits/NAME, ref_logprobs/NAME and counts (default: inputs are drawn)",
    )
    parser.add_argument(
        "--shape",
        type=_shape,
        help="T,V of drawn logits, or more dimensions (default: 64,1000; with a vocab_size 16 by a padded vocabulary)",
    )
    parser.add_argument("--dtype", choices=FLOATS, help="of logits and teachers (default: float32, or the file's)")
    parser.add_argument("--seed", type=_count, help="of drawn inputs (default: 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run this one, 'torch eager' say; may be repeated"
    )
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE", help="registers own loss types"
    )
    parser.add_argument(
        "--tolerance", type=_allowed, help="relative, against the reference (default: 1e-5; float64: 1e-12)"
    )
    parser.add_argument(
        "--tolerance-between", type=_allowed, help="relative, between implementations (default: 1e-6; float64: 1e-13)"
    )
    parser.add_argument("--last-places", type=_count, help="that half-precision gradients may differ by (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
