"""What sharing the softmax saves on a CPU: one pass for four losses against a pass for each, both compiled.

    python benchmarks/cpu.py [--tokens 1024] [--vocab 32000] [--repeats 9] [--write docs/performance_cpu.md]

Cross-entropy + z-loss + forward KL + entropy, value and gradient, float32. Each variant runs in a process of its own.
Its peak memory is what the process' resident set grew by while it ran, counted from when the inputs were there and
everything was compiled and had run once at a small size. The variants take turns, so that a busy moment of the
machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from duohead import CrossEntropy, Distillation, EntropyLoss, ZLoss
from duohead.table import markdown_table

LOSSES = {
    "ce": CrossEntropy(),
    "z": ZLoss(weight=1e-4),
    "kd": Distillation(loss_type="forward_kl", temperature=2.0, weight=0.5),
    "bonus": EntropyLoss(weight=-0.01),
}
VARIANTS = ("torch monolithic", "torch per_loss", "torch eager", "jax monolithic", "jax per_loss")
MEGABYTE = 2**20


def arrays(tokens: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logits, teacher logits, labels)."""
    random = np.random.default_rng(0)
    logits, teacher = random.standard_normal((2, tokens, vocab), np.float32)
    return logits, teacher, random.integers(0, vocab, tokens).astype(np.int32)


# ------------------------------------------------------------------------------------------------- what is measured


def torch_call(how: str, tokens: int, vocab: int) -> Callable[[], Any]:
    """One call of value and gradient; ``per_loss`` compiles every loss alone and adds the gradients in place."""
    import torch

    from duohead_torch import monolithic_loss_and_grad

    logits, teacher, labels = (torch.from_numpy(array) for array in arrays(tokens, vocab))
    implementation = "eager" if how == "eager" else "compiled"
    given = {"labels": labels.long(), "implementation": implementation}

    def monolithic() -> Any:
        return monolithic_loss_and_grad(logits, LOSSES, teacher_logits=teacher, **given)

    def per_loss() -> Any:
        total, gradient = torch.zeros(()), None
        for name, loss in LOSSES.items():
            with_teacher = {"teacher_logits": teacher} if loss.teacher is not None else {}
            (value, _), gradient = monolithic_loss_and_grad(
                logits, {name: loss}, out=gradient, accumulate=gradient is not None, **with_teacher, **given
            )
            total = total + value
        return total, gradient

    return per_loss if how == "per_loss" else monolithic


def jax_call(how: str, tokens: int, vocab: int) -> Callable[[], Any]:
    """The same in JAX; under one jit XLA would join the losses, so ``per_loss`` is a program for each."""
    import jax
    import jax.numpy as jnp

    from duohead_jax import monolithic_loss_and_grad

    logits, teacher, labels = (jnp.asarray(array) for array in arrays(tokens, vocab))

    def value_and_grad(losses: Any) -> Any:
        def call(x: jax.Array, y: jax.Array, ids: jax.Array) -> Any:
            return monolithic_loss_and_grad(x, losses, labels=ids, teacher_logits=y)

        return jax.jit(call)

    def added(losses: Any) -> Any:
        def call(x: jax.Array, y: jax.Array, ids: jax.Array, gradient: jax.Array) -> Any:
            return monolithic_loss_and_grad(x, losses, labels=ids, teacher_logits=y, out=gradient, accumulate=True)

        return jax.jit(call, donate_argnums=3)

    everything = value_and_grad(LOSSES)
    parts = [{name: loss} for name, loss in LOSSES.items()]
    first, rest = value_and_grad(parts[0]), [added(part) for part in parts[1:]]

    def monolithic() -> Any:
        return jax.block_until_ready(everything(logits, teacher, labels))

    def per_loss() -> Any:
        (total, _), gradient = first(logits, teacher, labels)
        for program in rest:
            ((value, _), gradient) = program(logits, teacher, labels, gradient)
            total = total + value
        return jax.block_until_ready((total, gradient))

    return per_loss if how == "per_loss" else monolithic


def peak_bytes() -> int:
    """The largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(variant: str, tokens: int, vocab: int) -> None:
    """Serves one variant: reads a line, runs one call, prints its seconds; at the end the growth of the peak."""
    framework, how = variant.split()
    make = torch_call if framework == "torch" else jax_call
    make(how, 16, vocab)()  # imports, compilers and their threads are not the call's memory
    call = make(how, tokens, vocab)
    before = peak_bytes()
    call()  # and compiles where the size is part of the program
    print(json.dumps({"peak": peak_bytes() - before}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        call()
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


# --------------------------------------------------------------------------------------------------- the whole run


def run(variants: Sequence[str], tokens: int, vocab: int, repeats: int) -> dict[str, dict[str, float]]:
    """Variant → median seconds and peak bytes; the processes wait for their turns."""
    size = ["--tokens", str(tokens), "--vocab", str(vocab)]
    workers: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, dict[str, Any]] = {}
    for variant in variants:
        print(f"preparing {variant}", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--variant", variant, *size]
        workers[variant] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        found[variant] = {**_answer(workers[variant]), "all": []}
    for turn in range(repeats):
        print(f"turn {turn + 1} of {repeats}", file=sys.stderr, flush=True)
        for variant, worker in workers.items():
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
            found[variant]["all"].append(_answer(worker)["seconds"])
    for worker in workers.values():
        worker.communicate()
    return {name: {"seconds": statistics.median(item["all"]), "peak": item["peak"]} for name, item in found.items()}


def _answer(worker: subprocess.Popen[str]) -> dict[str, float]:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a measuring process stopped with status {worker.wait()}")
    answer: dict[str, float] = json.loads(line)
    return answer


def report(found: dict[str, dict[str, float]], tokens: int, vocab: int, repeats: int) -> str:
    """The Markdown page."""
    size = 4 * tokens * vocab / MEGABYTE
    rows = []
    for name, item in found.items():
        base = found[f"{name.split()[0]} monolithic"]
        rows.append(
            [
                name,
                f"{1e3 * item['seconds']:.0f} ms",
                f"{item['seconds'] / base['seconds']:.2f}×",
                f"{item['peak'] / MEGABYTE:.0f} MiB",
                f"{item['peak'] / base['peak']:.2f}×",
            ]
        )
    return f"""# On a CPU

Cross-entropy + z-loss + forward KL + entropy, value and gradient, {tokens} × {vocab} float32 (an array of that size is
{size:.0f} MiB), median of {repeats} calls in one run of `python benchmarks/cpu.py`. `monolithic` is one compiled pass,
`per_loss` compiles each loss by itself and adds the gradients in place; ratios are to `monolithic` of the same
framework. Memory is the growth of the process' peak over the inputs: the gradient is one such array.

{markdown_table(["variant", "time", "ratio", "peak memory", "ratio"], rows)}

{_machine()}
"""


def _machine() -> str:
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "numpy"))
    return f"{os.cpu_count()} cores of {model}; Python {platform.python_version()}, {versions}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--frameworks", nargs="+", choices=("torch", "jax"), default=("torch", "jax"))
    parser.add_argument("--write", type=Path, help="also write the page to this file")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        measure(options.variant, options.tokens, options.vocab)
        return
    size = (options.tokens, options.vocab, options.repeats)
    variants = [variant for variant in VARIANTS if variant.split()[0] in options.frameworks]
    page = report(run(variants, *size), *size)
    print(page)
    if options.write is not None:
        options.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
