"""Checks the kernels on a GPU, then times them; ``python benchmarks/h200.py --budget 540``. Every item stands alone.

Times are of the device: each call is enqueued behind a short sleep, so that launching costs nothing, and the median of
several calls is given as a ratio to ``gradient.copy_(logits)`` of the same bytes. Checks come before times.
"""
# ruff: noqa: E402, B023  (paths and settings come before the imports; closures are called where they are made)

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch

from duohead import DPO, GRPO, GSPO, CrossEntropy, Distillation, EntropyLoss, ZLoss
from duohead.kernels import launch
from duohead.loss import Loss
from duohead.spec import HeadSpec
from duohead_torch import monolithic_loss, monolithic_loss_and_grad

SHAPES = ((8192, 128256), (16384, 32000), (8192, 151936), (4096, 262144))
SETS: dict[str, dict[str, Loss]] = {
    "ce+z": {"ce": CrossEntropy(), "z": ZLoss(weight=1e-4)},
    "rl": {
        "ce": CrossEntropy(),
        "z": ZLoss(weight=1e-4),
        "h": EntropyLoss(weight=-0.01),
        "rl": GRPO(epsilon_high=0.28, beta=0.05),
    },
    "kd": {"ce": CrossEntropy(), "z": ZLoss(weight=1e-4), "kd": Distillation(loss_type="forward_kl", weight=0.5)},
    "two": {"ce": CrossEntropy(), "z": ZLoss(weight=1e-4), "rl": GRPO(), "gspo": GSPO(), "dpo": DPO()},
}
EXTRA_SETS: dict[str, dict[str, Loss]] = {
    "ce": {"ce": CrossEntropy()},
    "smoothed": {"ce": CrossEntropy(label_smoothing=0.1)},
    "scales": {"ce": CrossEntropy(), "cold": CrossEntropy(logits_scale_factor=2.0), "h": EntropyLoss(weight=-0.01)},
    "reverse": {"kd": Distillation(loss_type="reverse_kl", temperature=2.0), "soft": Distillation()},
    "jsd": {"ce": CrossEntropy(), "kd": Distillation(loss_type="jsd", jsd_beta=0.3)},
    "sapo": {"rl": GRPO(objective="sapo"), "cispo": GRPO(objective="cispo", reduction="sequence_mean_token_mean")},
}
TARGETS = {
    "ce+z": (1.35, 1.17, 1.35, 1.47),
    "rl": (1.40, 1.22, 1.40, 1.52),
    "kd": (2.25, 2.0, 2.25, 2.3),
    "two": (1.75, 1.7, 1.75, 1.8),
}
STARTED = time.time()
RECORDS: list[dict[str, Any]] = []
BUDGET = 540.0


def left() -> float:
    """Seconds of the budget that remain."""
    return BUDGET - (time.time() - STARTED)


def record(**values: Any) -> None:
    RECORDS.append(values)


def say(*words: Any) -> None:
    print(*words, flush=True)


def guarded(name: str, function: Callable[[], Any], need: float = 5.0) -> Any:
    """Runs one item; whatever it raises is one line, and the next item runs."""
    if left() < need:
        say(f"-- {name}: no time left")
        return None
    try:
        return function()
    except Exception as error:  # every item must stand alone
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = str(error).strip().replace("\n", " | ")[:600]
        say(f"!! {name}: {type(error).__name__} at {where.filename}:{where.lineno}: {message}")
        record(item=name, error=f"{type(error).__name__}: {message}")
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


# --- inputs -----------------------------------------------------------------------------------------------------------


def make_inputs(rows: int, vocab: int, dtype: torch.dtype = torch.bfloat16, teacher: bool = True) -> dict[str, Any]:
    """Logits and everything beside them, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(rows + vocab)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    def logits() -> torch.Tensor:
        out = torch.empty(rows, vocab, dtype=dtype, device="cuda")
        for begin in range(0, rows, 2048):
            out[begin : begin + 2048].copy_(normal(min(2048, rows - begin), vocab) * 2.0)
        return out

    labels = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    labels[::17] = -100
    length = max(rows // 16, 1)
    segments = torch.arange(rows, device="cuda") // length
    count = int(segments[-1]) + 1
    pairs = torch.arange(count // 2 * 2, device="cuda").reshape(-1, 2)
    found = {
        "logits": logits(),
        "labels": labels,
        "advantages": normal(rows),
        "old_logprobs": -normal(rows).abs() - 10.0,
        "ref_logprobs": -normal(rows).abs() - 10.0,
        "segment_ids": segments,
        "preference_pairs": pairs,
        "num_segments": count,
    }
    if teacher:
        found["teacher_logits"] = logits()
    return found


NEEDS = {
    "rl": ("advantages", "old_logprobs", "ref_logprobs"),
    "kd": ("teacher_logits",),
    "two": ("advantages", "old_logprobs", "ref_logprobs", "segment_ids", "preference_pairs", "num_segments"),
    "reverse": ("teacher_logits",),
    "jsd": ("teacher_logits",),
    "sapo": ("advantages", "old_logprobs", "segment_ids", "num_segments"),
}


def arguments_of(name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: inputs[key] for key in ("labels", *NEEDS.get(name, ()))}


# --- checks -----------------------------------------------------------------------------------------------------------


def ulps(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest distance in last places of the found dtype; ``wanted`` is float64."""
    rounded = wanted.to(found.dtype)
    if found.dtype == torch.float32:
        return float("nan")

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int16).to(torch.int32)
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return float((ordered(found) - ordered(rounded)).abs().max()) if found.numel() else 0.0


def check_case(name: str, run: Callable[[HeadSpec, dict[str, Any], str], Any]) -> str | None:
    """Why a case file fails, or None."""
    from helpers import load_case, numbers

    case = load_case(name)
    if case["dtype"] == "float64":
        return None
    loss, losses, metrics, gradient = run(HeadSpec.from_dict(case["head"]), case["inputs"], case["dtype"])
    expected, tolerance = case["expected"], {"rtol": case["rtol"], "atol": case["atol"]}
    try:
        np.testing.assert_allclose(loss, expected["loss"], **tolerance)
        for key, value in expected["losses"].items():
            np.testing.assert_allclose(losses[key], value, err_msg=key, **tolerance)
        for key, value in expected["metrics"].items():
            np.testing.assert_allclose(metrics[key], value, err_msg=key, **tolerance)
        wanted = np.array(numbers(expected["logits_grad"]), np.float64)
        np.testing.assert_allclose(gradient, wanted, **tolerance)
        if case["dtype"] == "bfloat16":
            apart = ulps(torch.tensor(gradient).to(torch.bfloat16), torch.tensor(wanted))
            assert apart <= 1, f"gradient {apart} last places from the float64 reference"
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return None


def run_torch(head: HeadSpec, inputs: dict[str, Any], dtype: str) -> Any:
    from helpers import to_torch

    arrays = {key: _cuda(value) for key, value in to_torch(inputs, dtype).items()}
    logits = arrays.pop("logits").requires_grad_()
    loss, aux = monolithic_loss(logits, head, implementation="triton", **arrays)
    loss.backward()
    (other, _), gradient = monolithic_loss_and_grad(logits.detach(), head, implementation="triton", **arrays)
    assert torch.equal(gradient.nan_to_num(), logits.grad.nan_to_num()), "the two entry points differ"
    assert torch.equal(other.nan_to_num(), loss.detach().nan_to_num()), "the two losses differ"
    numbers_of = {key: float(value) for key, value in aux.losses.items()}
    metrics = {key: float(value) for key, value in aux.metrics.items()}
    return float(loss), numbers_of, metrics, logits.grad.double().cpu().numpy()


def run_jax(head: HeadSpec, inputs: dict[str, Any], dtype: str) -> Any:
    from helpers import to_jax

    import duohead_jax

    arrays = to_jax(inputs, dtype)
    logits = arrays.pop("logits")
    (loss, aux), gradient = duohead_jax.monolithic_loss_and_grad(logits, head, implementation="triton", **arrays)
    losses = {key: float(value) for key, value in aux.losses.items()}
    metrics = {key: float(value) for key, value in aux.metrics.items()}
    return float(loss), losses, metrics, np.asarray(gradient, np.float64)


def _cuda(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cuda(item) for key, item in value.items()}
    return value.cuda() if isinstance(value, torch.Tensor) else value


def check_cases(framework: str) -> None:
    from helpers import case_names

    run = run_torch if framework == "torch" else run_jax
    wrong, total = [], 0
    for name in case_names():
        if left() < 20:
            break
        total += 1
        try:
            reason = check_case(name, run)
        except Exception as error:  # one line for each
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if reason is not None:
            wrong.append(name)
            say(f"   {framework} {name}: {reason}")
    say(f"cases through {framework}: {total - len(wrong)} of {total} right")
    record(item="cases", framework=framework, total=total, wrong=wrong)


def check_random(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """Every set at a shape of several tiles, against the array code in float64; NaN in what must be overwritten."""
    inputs = make_inputs(rows, vocab, dtype)
    cells = []
    for name, losses in (SETS | EXTRA_SETS).items():
        arguments = arguments_of(name, inputs)
        double = {
            key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
            for key, value in arguments.items()
        }
        (loss, aux), gradient = monolithic_loss_and_grad(
            inputs["logits"].double(), losses, implementation="eager", **double
        )
        out = torch.full_like(inputs["logits"], float("nan"))
        (found, found_aux), _ = monolithic_loss_and_grad(
            inputs["logits"], losses, implementation="triton", out=out, **arguments
        )
        scale = gradient.abs().amax()
        worst = float((out.double() - gradient).abs().amax() / scale)
        # Relative to the gradient's own value where it is not tiny: half a last place of bfloat16 is 2^-9.
        big = gradient.abs() > 1e-6 * scale
        relative = float(((out.double() - gradient).abs() / gradient.abs().clamp(min=1e-300))[big].amax())
        values = max(
            abs(float(found_aux.losses[key]) - float(value)) / (1e-6 + abs(float(value)))
            for key, value in aux.losses.items()
        )
        metrics = max(
            (abs(float(found_aux.metrics[k]) - float(v)) / (1e-3 + abs(float(v))) for k, v in aux.metrics.items()),
            default=0.0,
        )
        total = abs(float(found) - float(loss)) / (1e-6 + abs(float(loss)))
        limit = {torch.bfloat16: 0.0045, torch.float16: 6e-4, torch.float32: 3e-5}[dtype]
        good = worst < limit and values < 3e-5 and metrics < 1e-3 and total < 3e-5 and not out.isnan().any()
        cells.append(f"{name} {'ok' if good else 'WRONG'} g{worst:.1e}/{relative:.1e} l{values:.1e} m{metrics:.1e}")
        record(item="random", shape=(rows, vocab), dtype=str(dtype), set=name, good=good, grad=worst, values=values)
        del gradient, out
    say(f"random {rows}x{vocab} {str(dtype)[6:]}: " + "; ".join(cells))


def check_variants() -> None:
    """Upstream 2 and a second backward, accumulate, overwrite, value only, masked NaN rows, V that divides nothing."""
    inputs = make_inputs(257, 50257)
    losses, labels = SETS["ce+z"], inputs["labels"]
    logits = inputs["logits"]
    logits[labels < 0] = float("nan")

    def run(x: torch.Tensor, **more: Any) -> Any:
        return monolithic_loss_and_grad(x, losses, labels=labels, implementation="triton", **more)

    (loss, _), gradient = run(logits)
    assert not gradient.isnan().any()
    assert not gradient[labels < 0].any()
    x = logits.clone().requires_grad_()
    value, _ = monolithic_loss(x, losses, labels=labels, implementation="triton")
    (2.0 * value).backward(retain_graph=True)
    _, twice = run(logits, grad_scale=2.0)
    assert torch.equal(x.grad, twice), "upstream 2"
    x.grad = None
    value.backward()
    assert torch.equal(x.grad, gradient), "second backward"
    x = logits.clone().requires_grad_()
    value, _ = monolithic_loss(x, losses, labels=labels, implementation="triton", overwrite_logits=True)
    value.backward()
    assert x.grad.data_ptr() == x.data_ptr() or torch.equal(x.grad, gradient), "overwrite"
    y = logits.clone()
    run(y, out=y)
    assert torch.equal(y, gradient), "out=logits"
    total = torch.ones(257, 50257, device="cuda")
    run(logits, out=total, accumulate=True)
    _, exact = run(logits, out=torch.empty_like(total))
    assert torch.allclose(total, 1.0 + exact, atol=1e-7), "accumulate"
    only, _ = monolithic_loss(logits, losses, labels=labels, implementation="triton")
    assert torch.equal(only, loss), "value only"
    wide = torch.randn(64, 3, 1000, device="cuda")[:, 1]
    label = torch.randint(0, 1000, (64,), device="cuda")
    (a, _), g = monolithic_loss_and_grad(wide, losses, labels=label, implementation="triton")
    (b, _), h = monolithic_loss_and_grad(wide, losses, labels=label, implementation="eager")
    assert torch.allclose(a, b, rtol=1e-5), "strides"
    assert torch.allclose(g, h, atol=1e-6), "strides"
    compiled = torch.compile(
        lambda x: monolithic_loss(x, losses, labels=labels, implementation="triton").loss * 1.0, fullgraph=True
    )
    x = logits.clone().requires_grad_()
    value = compiled(x)
    value.backward()
    assert torch.equal(x.grad, gradient), "inside torch.compile"
    say("upstream, second backward, overwrite, accumulate, value only, strides, torch.compile: ok")
    record(item="variants", good=True)


def check_large(rows: int, vocab: int) -> None:
    """More than 2^31 elements: sampled rows against float64, in place."""
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda")
    for begin in range(0, rows, 4096):
        logits[begin : begin + 4096].normal_(0.0, 2.0)
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    sample = torch.tensor([0, 1, rows // 2, rows - 2, rows - 1], device="cuda")
    kept = logits[sample].double()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = monolithic_loss_and_grad(
        logits, SETS["ce+z"], labels=labels, implementation="triton", out=logits, num_tokens=1.0
    )
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    (_, wanted) = monolithic_loss_and_grad(
        kept, SETS["ce+z"], labels=labels[sample], implementation="eager", num_tokens=1.0
    )
    found = logits[sample].double()
    worst = float(((found - wanted).abs() / (wanted.abs() + 1e-9)).amax())
    finite = bool(torch.isfinite(result.result.loss))
    size = f"{rows}x{vocab} ({rows * vocab / 2**31:.2f} x 2^31)"
    say(f"large {size} in place: rel {worst:.1e} finite {finite}; extra {extra / 2**20:.1f} MiB")
    record(item="large", shape=(rows, vocab), relative=worst, extra=extra)


# --- times ------------------------------------------------------------------------------------------------------------


#: a sleep of about a millisecond
CYCLES = 2_000_000


def device_ms(function: Callable[[], Any], repeats: int = 9) -> float:
    """The median time on the device, each call enqueued behind a sleep that outlasts its launching."""
    function()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    function()
    sleep = max(CYCLES, int(2e3 * (time.perf_counter() - begun) * CYCLES))
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(sleep)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def wall_ms(function: Callable[[], Any], repeats: int = 20) -> float:
    """The time of a call among many that are enqueued one behind the other."""
    function()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats * 1e3


def copy_ms(inputs: Mapping[str, Any], out: torch.Tensor) -> float:
    return device_ms(lambda: out.copy_(inputs["logits"]), 25)


def time_shape(index: int, rows: int, vocab: int, forms: tuple[str, ...]) -> None:
    """All sets at one shape; one line a set."""
    inputs = make_inputs(rows, vocab)
    logits = inputs["logits"]
    out = torch.empty_like(logits)
    floor = copy_ms(inputs, out)
    say(f"\n{rows}x{vocab} bf16; copy {floor:.3f} ms ({4e-6 * rows * vocab / floor:.0f} GB/s); ratios to the copy:")
    for name, losses in SETS.items():
        arguments = arguments_of(name, inputs)
        cells = []

        def grad(implementation: str = "triton") -> Any:
            return monolithic_loss_and_grad(logits, losses, implementation=implementation, out=out, **arguments)

        def step() -> None:
            x = logits.detach().requires_grad_()
            monolithic_loss(x, losses, implementation="triton", **arguments).loss.backward()

        def value() -> None:
            monolithic_loss(logits, losses, implementation="triton", **arguments)

        def per_loss() -> None:
            for key, loss in losses.items():
                monolithic_loss_and_grad(logits, {key: loss}, implementation="compiled", out=out, **arguments)

        made: dict[str, tuple[Callable[[], Any], Callable[..., float]]] = {
            "grad": (grad, device_ms),
            "step": (step, device_ms),
            "wall": (step, wall_ms),
            "value": (value, device_ms),
            "compiled": (lambda: grad("compiled"), device_ms),
            "per_loss": (per_loss, device_ms),
        }
        for form in forms:
            if left() < 25:
                cells.append(f"{form} -")
                continue
            function, clock = made[form]

            def measure(function: Any = function, clock: Any = clock, form: str = form, name: str = name) -> float:
                gc.collect()
                ms = clock(function)
                record(item="time", shape=(rows, vocab), set=name, form=form, ms=ms, ratio=ms / floor, copy=floor)
                return ms

            ms = guarded(f"{name} {form}", measure)
            cells.append(f"{form} " + ("failed" if ms is None else f"{ms / floor:.3f}"))
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if guarded(f"{name} memory", step, 10) is None:
            extra = torch.cuda.max_memory_allocated() - base
            cells.append(f"peak +{extra / 2**20:.1f} MiB (gradient {logits.numel() * 2 / 2**20:.1f})")
            record(item="memory", shape=(rows, vocab), set=name, extra=extra, gradient=logits.numel() * 2)
        say(f"  {name:5s} target {TARGETS[name][index]:.2f}: " + "  ".join(cells))


TUNED = (
    launch.Shape(16, 2, False),
    launch.Shape(32, 4, True),
    launch.Shape(16, 2, True),
    launch.Shape(8, 4, False),
    launch.Shape(16, 4, True),
    launch.Shape(32, 2, True),
    launch.Shape(32, 1, True),
    launch.Shape(16, 1, True),
)


def tune(rows: int, vocab: int, names: tuple[str, ...]) -> None:
    """The fused launch (and the two launches) at every block of a short list, with its registers and spills."""
    inputs = make_inputs(rows, vocab)
    out = torch.empty_like(inputs["logits"])
    floor = copy_ms(inputs, out)
    for name in names:
        arguments = arguments_of(name, inputs)
        cells = []
        for shape in TUNED:
            if left() < 25:
                break
            launch.override = shape
            try:

                def run() -> Any:
                    return monolithic_loss_and_grad(
                        inputs["logits"],
                        SETS[name],
                        implementation="triton",
                        out=out,
                        **arguments,
                    )

                ms = device_ms(run, 5)
                registers = _registers(shape.warps)
                cells.append(f"W{shape.warps}U{shape.unroll}{'D' if shape.ahead else ''} {ms / floor:.3f} {registers}")
                record(
                    item="tune",
                    shape=(rows, vocab),
                    set=name,
                    block=tuple(shape),
                    ratio=ms / floor,
                    registers=registers,
                )
            except Exception as error:  # a block that does not launch is one cell
                cells.append(f"W{shape.warps}U{shape.unroll} {type(error).__name__}")
            finally:
                launch.override = None
        say(f"  tune {name:5s} {rows}x{vocab}: " + "  ".join(cells))


def _registers(warps: int) -> str:
    """Registers and spills of the kernels that were launched last, as far as Triton tells."""
    from duohead_torch import triton_launch as runner

    found = runner.last_launch.get("fused") or runner.last_launch.get("write")
    try:
        return f"[{found.n_regs}r{'' if not found.n_spills else f' {found.n_spills}sp'}]"
    except Exception:  # an older or newer Triton names them otherwise
        return ""


# --- others -----------------------------------------------------------------------------------------------------------


def time_liger(rows: int, vocab: int) -> None:
    from liger_kernel.transformers.functional import liger_cross_entropy

    inputs = make_inputs(rows, vocab, teacher=False)
    labels = inputs["labels"]
    out = torch.empty_like(inputs["logits"])
    floor = copy_ms(inputs, out)
    del out

    def run() -> None:
        # It writes the gradient over the logits: what it is given must be a fresh copy, whose time is not counted.
        x = inputs["logits"].detach().requires_grad_()
        liger_cross_entropy(x, labels, lse_square_scale=1e-4, return_z_loss=True).loss.backward()

    ms = device_ms(run)
    say(f"  liger ce+z {rows}x{vocab}: {ms / floor:.3f}")
    record(item="liger", shape=(rows, vocab), ratio=ms / floor)


def to_jax(value: torch.Tensor) -> Any:
    import jax

    return jax.dlpack.from_dlpack(value)


def kernels_ms(function: Callable[[], Any], wait: Callable[[Any], Any], repeats: int = 5) -> float:
    """The time of a call's kernels on the device, summed, whichever framework launched them; gaps do not count."""
    from torch.profiler import ProfilerActivity, profile

    wait(function())
    wait(function())
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            wait(function())
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert events, "no kernel was recorded"
    return sum(event.time_range.elapsed_us() for event in events) / repeats / 1e3


def wall_of(function: Callable[[], Any], wait: Callable[[Any], Any], repeats: int = 10) -> float:
    """The wall clock of a call among several enqueued one behind the other."""
    wait(function())
    begin = time.perf_counter()
    for _ in range(repeats):
        result = function()
    wait(result)
    return (time.perf_counter() - begin) / repeats * 1e3


def time_jax(rows: int, vocab: int, implementations: tuple[str, ...]) -> None:
    import jax
    import optax

    import duohead_jax

    inputs = make_inputs(rows, vocab)
    out = torch.empty_like(inputs["logits"])
    floor = kernels_ms(lambda: out.copy_(inputs["logits"]), lambda _: torch.cuda.synchronize())
    logits = to_jax(inputs["logits"])
    cells = []

    def enter(name: str, form: str, function: Callable[[], Any], wait: Callable[[Any], Any]) -> None:
        def measure() -> tuple[float, float]:
            return kernels_ms(function, wait), wall_of(function, wait)

        found = guarded(f"jax {name} {form}", measure)
        if found is not None:
            cells.append(f"{name}/{form} {found[0] / floor:.3f} (wall {found[1] / floor:.2f})")
            record(
                item="jax",
                shape=(rows, vocab),
                set=name,
                form=form,
                ms=found[0],
                ratio=found[0] / floor,
                wall=found[1] / floor,
            )

    for name, losses in SETS.items():
        given = arguments_of(name, inputs)

        def torch_step(losses: Any = losses, given: Any = given) -> Any:
            return monolithic_loss_and_grad(inputs["logits"], losses, implementation="triton", out=out, **given)

        enter(name, "torch triton", torch_step, lambda _: torch.cuda.synchronize())
        arguments = {k: to_jax(v) if torch.is_tensor(v) else v for k, v in arguments_of(name, inputs).items()}
        segments = arguments.pop("num_segments", None)
        for implementation in implementations:
            if left() < 30:
                break

            def step(x: Any, rest: Any, losses: Any = losses, implementation: str = implementation) -> Any:
                return duohead_jax.monolithic_loss_and_grad(
                    x,
                    losses,
                    implementation=implementation,
                    num_segments=segments,
                    **rest,
                )

            jitted = jax.jit(step)
            enter(name, implementation, lambda: jitted(logits, arguments), jax.block_until_ready)

    def optax_loss(x: Any, labels: Any) -> Any:
        valid = labels >= 0
        x = x.astype("float32")
        lse = jax.nn.logsumexp(x, -1)
        each = optax.softmax_cross_entropy_with_integer_labels(x, labels.clip(0)) + 1e-4 * lse * lse
        return (each * valid).sum() / valid.sum()

    by_optax, labels = jax.jit(jax.value_and_grad(optax_loss)), to_jax(inputs["labels"])
    enter("ce+z", "optax", lambda: by_optax(logits, labels), jax.block_until_ready)
    say(f"  jax {rows}x{vocab}: " + "  ".join(cells))


def check_identical(rows: int, vocab: int) -> None:
    """Losses, metrics and gradients of both frameworks on the same buffers, bit for bit."""
    import jax

    import duohead_jax

    inputs = make_inputs(rows, vocab)
    cells = []
    for name, losses in (SETS | EXTRA_SETS).items():
        if left() < 20:
            break
        arguments = arguments_of(name, inputs)
        (loss, aux), gradient = monolithic_loss_and_grad(inputs["logits"], losses, implementation="triton", **arguments)
        torch.cuda.synchronize()
        theirs = {k: to_jax(v) if torch.is_tensor(v) else v for k, v in arguments.items()}

        def run(theirs: Any = theirs, losses: Any = losses) -> Any:
            return duohead_jax.monolithic_loss_and_grad(
                to_jax(inputs["logits"]), losses, implementation="triton", **theirs
            )

        found = guarded(f"identical {name}", run)
        if found is None:
            continue
        (their_loss, their_aux), their_gradient = jax.block_until_ready(found)
        pairs = [(loss, their_loss), *((aux.losses[k], their_aux.losses[k]) for k in aux.losses)]
        pairs += [(aux.metrics[k], their_aux.metrics[k]) for k in aux.metrics]
        scalars = sum(float(a) != float(b) for a, b in pairs)
        same = torch.equal(torch.from_dlpack(their_gradient), gradient)
        differs = f"gradient {same}, {scalars} of {len(pairs)} scalars differ"
        cells.append(f"{name} {'identical' if same and not scalars else differs}")
        record(item="identical", set=name, gradient=same, scalars_differ=scalars, scalars=len(pairs))
    say("torch = jax on the same buffers: " + "; ".join(cells))


def sanitize() -> None:
    """memcheck and racecheck of a small run, where the tool is installed."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        say("compute-sanitizer: not installed here")
        return
    for kind in ("memcheck", "racecheck"):
        command = [tool, "--tool", kind, sys.executable, __file__, "--items", "small", "--budget", "200"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(left() - 10, 10), check=False)
        lines = [line for line in done.stdout.splitlines() if "SUMMARY" in line or "hazard" in line]
        say(f"compute-sanitizer {kind}: rc {done.returncode} {' '.join(lines)[:300]}")
        record(item="sanitizer", tool=kind, rc=done.returncode, summary=lines[:4])


def small_run() -> None:
    """A few small launches of every kind, for the sanitizer."""
    inputs = make_inputs(5, 20011)
    for name, losses in (SETS | EXTRA_SETS).items():
        arguments = arguments_of(name, inputs)
        x = inputs["logits"].clone().requires_grad_()
        if name != "two":
            (2.0 * monolithic_loss(x, losses, implementation="triton", **arguments).loss).backward()
    torch.cuda.synchronize()
    say("small run done")


def count_variants() -> None:
    """Compiled variants of the fused kernel over many shapes and hyperparameters, and the first call's time."""
    from duohead.checks import given_inputs
    from duohead.kernels import build
    from duohead.kernels.build import Flags
    from duohead.plan import make_plan

    begin = time.time()
    for step, (rows, vocab) in enumerate(
        [(3, 64), (4, 1000), (5, 1024), (7, 5000), (64, 32000), (65, 32001), (9, 131072), (16, 200000)]
    ):
        x = torch.randn(rows, vocab, device="cuda").bfloat16()
        label = torch.randint(0, vocab, (rows,), device="cuda")
        spec = {"ce": CrossEntropy(label_smoothing=0.05 + 0.01 * step), "z": ZLoss(weight=0.125 + step)}
        monolithic_loss_and_grad(x, spec, labels=label, implementation="triton")
        torch.cuda.synchronize()
        if step == 0:
            first = time.time() - begin
    given = given_inputs({"labels": label}, {}, {})
    plan, _ = make_plan(spec, given)
    kernel = build.fused(plan, Flags(True, False, False, True, False)).function
    caches = getattr(kernel, "device_caches", {})
    variants = sum(len(cache[0]) for cache in caches.values())
    say(f"first call {first:.1f} s; fused: {variants} compiled variants over 8 shapes and 8 sets of hyperparameters")
    record(item="variants", first_call=first, variants=variants)


def markdown() -> str:
    """The records as the tables of docs/performance.md."""
    shapes = list(
        dict.fromkeys(
            tuple(item["shape"]) for item in RECORDS if item["item"] in ("time", "jax", "liger") and "shape" in item
        )
    )
    head = "| | " + " | ".join(f"{rows}×{vocab}" for rows, vocab in shapes) + " |"
    lines = [head, "|---" * (len(shapes) + 1) + "|"]
    kinds = [item for item in RECORDS if item["item"] in ("time", "jax", "liger") and "ratio" in item]
    for key in dict.fromkeys((item["item"], item.get("set", "ce+z"), item.get("form", "liger")) for item in kinds):
        cells = []
        for shape in shapes:
            found = [
                item["ratio"]
                for item in kinds
                if (item["item"], item.get("set", "ce+z"), item.get("form", "liger")) == key
                and tuple(item["shape"]) == shape
            ]
            cells.append(f"{found[-1]:.3f}" if found else "–")
        name = " ".join(key[1:]) if key[0] == "time" else f"{key[1]} {key[0]} {key[2]}"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| peak beside the logits, MiB | " + " | ".join(f"{r}×{v}" for r, v in shapes) + " |"]
    lines.append("|---" * (len(shapes) + 1) + "|")
    memory = [item for item in RECORDS if item["item"] == "memory"]
    for name in dict.fromkeys(item["set"] for item in memory):
        found = {tuple(item["shape"]): item for item in memory if item["set"] == name}
        cells = [
            f"{found[s]['extra'] / 2**20:.1f} (gradient {found[s]['gradient'] / 2**20:.1f})" if s in found else "–"
            for s in shapes
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    global BUDGET
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--items", default="check,jaxcheck,times,large,jax,liger,variants,sanitize")
    parser.add_argument("--forms", default="grad,step,value,compiled")
    parser.add_argument("--shapes", default="0,1,2,3")
    parser.add_argument("--tune-sets", default="ce+z,rl,kd,two")
    options = parser.parse_args()
    BUDGET = options.budget
    items = options.items.split(",")
    shapes = [(int(i), *SHAPES[int(i)]) for i in options.shapes.split(",")]
    with contextlib.suppress(Exception):
        import triton

        say(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    if "small" in items:
        small_run()
    if "calls" in items or "check" in items:
        guarded("variants of the call", check_variants)
    if "check" in items:
        for rows, vocab, dtype in (
            (96, 50257, torch.bfloat16),
            (64, 128256, torch.bfloat16),
            (33, 5003, torch.float32),
            (40, 32000, torch.float16),
        ):
            guarded(f"random {rows}x{vocab}", lambda r=rows, v=vocab, d=dtype: check_random(r, v, d))
        guarded("cases", lambda: check_cases("torch"))
    if "tune" in items:
        for _, rows, vocab in shapes:
            guarded("tune", lambda r=rows, v=vocab: tune(r, v, tuple(options.tune_sets.split(","))))
    if "times" in items:
        for index, rows, vocab in shapes:
            guarded("times", lambda i=index, r=rows, v=vocab: time_shape(i, r, v, tuple(options.forms.split(","))))
    if "large" in items:
        for rows, vocab in ((70000, 32768), (8448, 262144)):
            guarded("large", lambda r=rows, v=vocab: check_large(r, v), 15)
    if "jaxcheck" in items:
        guarded("cases through jax", lambda: check_cases("jax"))
    if "jaxcheck" in items or "identical" in items:
        guarded("identical", lambda: check_identical(512, 32000))
    if "jax" in items:
        for _, rows, vocab in shapes[:2]:
            guarded("jax", lambda r=rows, v=vocab: time_jax(r, v, ("triton", "xla")), 30)
    if "liger" in items:
        for _, rows, vocab in shapes[:2]:
            guarded("liger", lambda r=rows, v=vocab: time_liger(r, v))
    if "variants" in items:
        guarded("variants", count_variants, 20)
    if "sanitize" in items:
        guarded("sanitize", sanitize, 60)
    folder = os.environ.get("OUT")
    if folder:
        Path(folder, "h200.json").write_text(json.dumps(RECORDS, default=str))
        Path(folder, "h200.md").write_text(markdown())
    say(f"done in {time.time() - STARTED:.0f} s")


if __name__ == "__main__":
    main()
