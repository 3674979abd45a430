"""Cross-entropy's loss and gradient against float64: ``python benchmarks/accuracy.py --write docs/accuracy.md``."""

from __future__ import annotations

import argparse
import importlib.util
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import torch
import torch.nn.functional as F  # noqa: N812

import duohead_jax
import duohead_torch

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
Run = Callable[[np.ndarray, np.ndarray, str], tuple[float, np.ndarray]]


class Inputs(NamedTuple):
    """Logits as float64 and labels."""

    logits: np.ndarray
    labels: np.ndarray


def ordinary(rows: int, vocab: int) -> Inputs:
    """Normal logits of scale 3."""
    rng = np.random.default_rng(0)
    return Inputs(rng.normal(size=(rows, vocab)) * 3, rng.integers(vocab, size=rows))


def sharp(rows: int, vocab: int) -> Inputs:
    """The label's probability runs from 0.5 to 0.9999."""
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(rows, vocab)) * 0.1, rng.integers(vocab, size=rows)
    wanted = 1 - np.geomspace(0.5, 1e-4, rows)
    logits[np.arange(rows), labels] = np.log(vocab * wanted / (1 - wanted))
    return Inputs(logits, labels)


SETS = {
    "ordinary, 64 × 4096": ordinary(64, 4096),
    "sharp, p to 0.9999, 64 × 4096": sharp(64, 4096),
    "V = 256000, 8 rows": ordinary(8, 256_000),
    "70,000 rows, V = 16": ordinary(70_000, 16),
}


def exact(inputs: Inputs, rounded: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean loss and its gradient in float64, of the logits as they are in the dtype."""
    x = rounded.astype(np.float64)
    rows = np.arange(len(x))
    x = x - x.max(-1, keepdims=True)
    log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
    gradient = np.exp(log_p)
    # p − 1 from what the other columns hold: no cancellation.
    others = gradient.copy()
    others[rows, inputs.labels] = 0
    gradient[rows, inputs.labels] = -others.sum(-1)
    return -log_p[rows, inputs.labels].mean(), gradient / len(x)


def tensor_of(array: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.tensor(array.astype(np.float64)).to(getattr(torch, dtype))


def torch_run(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Run:
    def run(logits: np.ndarray, labels: np.ndarray, dtype: str) -> tuple[float, np.ndarray]:
        x = tensor_of(logits, dtype).requires_grad_()
        loss = loss_of(x, torch.tensor(labels))
        loss.backward()
        assert x.grad is not None
        return float(loss.detach()), x.grad.double().numpy()

    return run


def jax_run(loss_of: Callable[[jax.Array, jax.Array], jax.Array]) -> Run:
    def run(logits: np.ndarray, labels: np.ndarray, dtype: str) -> tuple[float, np.ndarray]:
        loss, gradient = jax.jit(jax.value_and_grad(loss_of))(jnp.asarray(logits), jnp.asarray(labels))
        return float(loss), np.asarray(gradient).astype(np.float64)

    return run


def duohead_run(implementation: str, device: str = "cpu") -> Run:
    return torch_run(
        lambda x, labels: (
            duohead_torch.monolithic_loss(x.to(device), labels=labels.to(device), implementation=implementation).loss
        )
    )


RUNS: dict[str, Run] = {
    "duohead, torch eager": duohead_run("eager"),
    "duohead, torch compiled": duohead_run("compiled"),
    "duohead, torch per_loss": duohead_run("per_loss"),
    "duohead, jax xla": jax_run(lambda x, labels: duohead_jax.monolithic_loss(x, labels=labels).loss),
    "F.cross_entropy": torch_run(F.cross_entropy),
    "optax": jax_run(lambda x, labels: optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()),
}


def liger_run() -> Run | None:
    """Liger's cross-entropy, where it is installed and there is a GPU to run it."""
    if importlib.util.find_spec("liger_kernel") is None or not torch.cuda.is_available():
        return None
    from liger_kernel.transformers.functional import liger_cross_entropy

    def run(logits: np.ndarray, labels: np.ndarray, dtype: str) -> tuple[float, np.ndarray]:
        x = tensor_of(logits, dtype).cuda().requires_grad_()
        loss = liger_cross_entropy(x.clone(), torch.tensor(labels).cuda())  # it overwrites its input
        loss.backward()
        assert x.grad is not None
        return float(loss.detach()), x.grad.double().cpu().numpy()

    return run


#: what runs on a GPU; JAX runs there by default
GPU_RUNS: dict[str, Run] = {
    "duohead, torch triton": duohead_run("triton", "cuda"),
    "duohead, jax": RUNS["duohead, jax xla"],
    "F.cross_entropy": torch_run(lambda x, labels: F.cross_entropy(x.cuda(), labels.cuda())),
    "optax": RUNS["optax"],
}
LIGER = liger_run()
if LIGER is not None:
    GPU_RUNS["Liger"] = LIGER


def last_places(found: np.ndarray, wanted: np.ndarray, dtype: str) -> int:
    """The largest distance, counted in representable numbers, from the exact gradient rounded once."""
    kind = DTYPES[dtype]
    bits = {4: np.int32, 2: np.int16}[np.dtype(kind).itemsize]

    def ordered(array: np.ndarray) -> np.ndarray:
        raw = np.ascontiguousarray(array.astype(kind)).view(bits).astype(np.int64)
        return np.where(raw < 0, np.iinfo(bits).min - raw, raw)

    # Entries under a thousandth of the largest of their row say nothing: float32 itself has lost their digits.
    large = np.abs(wanted) > 1e-3 * np.abs(wanted).max(-1, keepdims=True)
    return int(np.abs(ordered(found) - ordered(wanted))[large].max())


class Errors(NamedTuple):
    """Relative error of the loss; of the gradient: relative rms, relative to the largest, in last places."""

    loss: float
    rms: float
    largest: float
    places: int


def errors(run: Run, inputs: Inputs, dtype: str) -> Errors:
    rounded = inputs.logits.astype(DTYPES[dtype])
    loss, gradient = exact(inputs, rounded)
    found_loss, found = run(rounded, inputs.labels, dtype)
    difference = found - gradient
    return Errors(
        abs(found_loss - loss) / abs(loss),
        float(np.sqrt((difference**2).sum() / (gradient**2).sum())),
        float(np.abs(difference).max() / np.abs(gradient).max()),
        last_places(found, gradient, dtype),
    )


def table(runs: dict[str, Run]) -> str:
    lines = []
    for title, inputs in SETS.items():
        lines += [f"## {title}", ""]
        for dtype in DTYPES:
            lines += [f"| {dtype} | loss, relative | gradient, rms | gradient, largest | last places |"]
            lines += ["| --- | --- | --- | --- | --- |"]
            for name, run in runs.items():
                found = errors(run, inputs, dtype)
                lines.append(f"| {name} | {found.loss:.1e} | {found.rms:.1e} | {found.largest:.1e} | {found.places} |")
            lines.append("")
    return "\n".join(lines)


HEAD = """# Accuracy

Mean cross-entropy and its gradient against float64, on the CPU, on the same logits as rounded to the dtype; made by
`python benchmarks/accuracy.py --write docs/accuracy.md`. "Last places" is the largest distance from the exact gradient
rounded once, among entries over a thousandth of their row's largest. Half-precision gradients cannot do better in rms
than the one rounding at the end: about 1.7e-3 in bfloat16, 2e-4 in float16. Others return the loss in the logits'
dtype, duohead in float32. What runs on a GPU, the kernel and Liger's cross-entropy among it, has a page of its own:
[accuracy_gpu.md](accuracy_gpu.md).

In no table is duohead's error larger than that of the best of the others by more than rounding
(`tests/test_accuracy.py` holds it to this: a gradient's rms to one and a half times theirs and one rounding of 6e-8,
a loss to four roundings, 2.4e-7). In half precision its error is the one rounding of the gradient. In float32 what
decides is Σ e^(x − max), where a confident row has one 1 and thousands of numbers too small to move it: eager torch on
the CPU adds them up apart from the ones, compiled torch, which would make long chains of the sum there, accumulates it
in float64, and XLA and kernels sum in trees (a chain, as in `F.cross_entropy`, loses ten times as much where p is near
1). Where duohead stands at 7 last places and optax at 3, p is made from log p, which entropy and KL need too: a number
near 10, whose own rounding is a few last places of p.

"""
GPU_HEAD = """# Accuracy on a GPU

The tables of [accuracy.md](accuracy.md) for what runs on a GPU, Liger's cross-entropy among it where it is installed;
made by `python benchmarks/accuracy.py --gpu --write docs/accuracy_gpu.md` on {device}. `duohead, jax` is the kernel
through jax-triton.

"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, help="the page to write; printed where left out")
    parser.add_argument("--gpu", action="store_true", help="what runs on a GPU")
    options = parser.parse_args()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, jax {jax.__version__}, "
    versions += f"optax {optax.__version__}."
    head = GPU_HEAD.format(device=torch.cuda.get_device_name()) if options.gpu else HEAD
    page = head + table(GPU_RUNS if options.gpu else RUNS) + "\n" + versions + "\n"
    if options.write:
        options.write.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
