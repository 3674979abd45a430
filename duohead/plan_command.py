"""``duohead-plan``: reads a configuration and prints what would run, or the configuration's JSON Schema."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from duohead.checks import FLOATS
from duohead.config_schema import schema
from duohead.plan_report import BACKENDS, DEVICES
from duohead.spec import HeadSpec

REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 where the configuration is refused (the reason goes to stderr)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.config is None and not options.schema:
        parser.error("config: name a YAML file, or ask for --schema")
    try:
        _register(options.imports)
        if options.schema:
            print(json.dumps(schema(), indent=2, ensure_ascii=False))
            return 0
        head = HeadSpec.from_yaml(Path(options.config))
        plan = head.plan(options.backend, options.device, vocab_size=options.vocab_size, dtype=options.dtype)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"{options.config or 'duohead-plan'}: {error}", file=sys.stderr)
        return REFUSED
    print(plan)
    return 0


def _register(modules: Sequence[str]) -> None:
    """Imports modules, of the working directory too, that register loss types."""
    if modules:
        sys.path.insert(0, os.getcwd())
    for module in modules:
        importlib.import_module(module)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="duohead-plan", description="Prints what the head of a configuration would run, and why."
    )
    parser.add_argument("config", nargs="?", help="YAML (or JSON) file")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of a configuration instead")
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE", help="registers own loss types"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="torch")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--vocab-size", type=int, help="V, for the bytes per row (default: the configuration's)")
    parser.add_argument("--dtype", choices=FLOATS, default="bfloat16", help="of logits and teachers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
