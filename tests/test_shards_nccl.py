"""Two GPUs: vocabulary shards over NCCL in PyTorch, and over the GPUs of one process in JAX.

Under pytest skipped where there are not two GPUs; on a machine that has them also ``python tests/test_shards_nccl.py``.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RANKS = 2
SECONDS = 540


def gpu_count() -> int:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in found.stdout.splitlines())


def torch_rank(rank: int, rendezvous: str) -> None:
    """One rank of the PyTorch part: every implementation against the unsharded call, collectives counted, no hang."""
    import shards_torch as checks
    import torch
    import torch.distributed as dist
    from helpers import to_torch
    from shards_inputs import all_losses, jsd_losses, random_inputs
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from duohead import CrossEntropy, ZLoss
    from duohead_torch import monolithic_loss

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=120),
        device_id=device,
    )
    env = checks.Rank(rank, RANKS)

    def moved(inputs: dict[str, object]) -> dict[str, object]:
        def move(value: object) -> object:
            if isinstance(value, dict):
                return {name: move(item) for name, item in value.items()}
            return value.to(device) if isinstance(value, torch.Tensor) else value

        return {name: move(value) for name, value in inputs.items()}

    losses = {**all_losses(), **jsd_losses()}
    small = {name: losses[name] for name in ("ce", "z", "h", "forward", "reverse", "rl")}
    # Rounding differs a little more where the GPU's fast exponentials and other orders of summation meet.
    tolerances = {"float32": 5e-6, "bfloat16": 5e-6}
    vocab = 1003
    for implementation in ("triton", "eager", "compiled"):
        for dtype in ("float32", "bfloat16"):
            chosen = small if implementation == "compiled" else losses  # it compiles for minutes
            inputs = moved(to_torch(random_inputs(1, vocab=vocab), dtype))
            logits, teachers = inputs.pop("logits"), inputs.pop("teacher_logits")
            whole = logits.clone().requires_grad_()
            expected = monolithic_loss(whole, chosen, teacher_logits=teachers, implementation="eager", **inputs)
            expected.loss.backward()
            split = checks.Split(env, "short", vocab, vocab)
            shard = split.take(logits).requires_grad_()
            parts = {name: split.take(teacher) for name, teacher in teachers.items()}
            arguments = {"teacher_logits": parts, "implementation": implementation, **split.arguments, **inputs}
            found = monolithic_loss(shard, chosen, **arguments)
            found.loss.backward()
            label = f"{implementation} {dtype}"
            checks.compare(f"{label} loss", found.loss.cpu(), expected.loss.cpu(), tolerances[dtype])
            gradient = torch.cat([piece.cpu() for piece in env.gather(shard.grad.cpu())], -1)
            checks.compare(f"{label} gradient", gradient, whole.grad.cpu(), tolerances[dtype], checks.ULP[dtype])
            bits = env.gather({name: value.item() for name, value in found.aux.losses.items()})
            assert bits[0] == bits[1], f"{label}: other scalars on the other rank"
            print(f"rank {rank}: {label} equals the unsharded call", flush=True)

    inputs = moved(to_torch(random_inputs(2, vocab=vocab), "bfloat16"))
    logits, labels = inputs["logits"].nan_to_num(neginf=-30.0), inputs["labels"]
    head = {"ce": CrossEntropy(), "z": ZLoss(weight=1e-4)}
    split = checks.Split(env, "short", vocab, vocab)
    shard = split.take(logits).requires_grad_()
    with checks.counted(["all_gather_into_tensor"]):
        eager = monolithic_loss(shard, head, labels=labels, implementation="eager", **split.arguments).loss
    with checks.counted([]):
        eager.backward()

    @torch.compile(fullgraph=True)
    def step(logits: torch.Tensor) -> torch.Tensor:
        return monolithic_loss(logits, head, labels=labels, vocab_group=env.group, vocab_size=vocab).loss

    again = shard.detach().clone().requires_grad_()
    compiled = step(again)
    compiled.backward()
    checks.compare("compiled step", compiled.cpu(), eager.cpu(), 5e-6)
    checks.compare("compiled step's gradient", again.grad.cpu(), shard.grad.cpu(), 5e-6, 2.0**-7)
    print(f"rank {rank}: a compiled step without graph breaks", flush=True)

    mesh = init_device_mesh("cuda", (RANKS,))
    tensor = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_()
    # Not the leaf itself: torch 2.11 gathers the gradient of a leaf whose shards are uneven, whoever takes its part.
    found = monolithic_loss(tensor * 1.0, head, labels=labels, implementation="eager").loss
    found.backward()
    checks.compare("DTensor", found.cpu(), eager.cpu(), 5e-6)
    assert tensor.grad.placements == tensor.placements
    print(f"rank {rank}: DTensor", flush=True)

    # No error is raised on the device: the loss is NaN on both ranks, and validate=True raises on both.
    wrong = labels + vocab * (rank == 1)
    nan = monolithic_loss(split.take(logits), head, labels=labels, vocab_size=vocab + 1, vocab_group=env.group).loss
    assert torch.isnan(nan), nan
    message = checks.refuses(
        "(rank 1 of vocab_group)",
        lambda: monolithic_loss(split.take(logits), head, labels=wrong, validate=True, **split.arguments),
    )
    assert len(set(env.gather(message))) == 1
    print(f"rank {rank}: errors on both ranks", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def jax_part() -> None:
    """Two GPUs of one process: shard_map with the gradient inside and outside, and plain jit."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from helpers import to_jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P
    from shards_inputs import all_losses, random_inputs

    from duohead_jax import monolithic_loss

    jax.config.update("jax_default_matmul_precision", "highest")
    assert len(jax.devices("gpu")) >= RANKS, jax.devices()
    mesh = jax.make_mesh((RANKS,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices("gpu")[:RANKS])
    inputs = to_jax(random_inputs(3, vocab=1024), "float32")
    logits, teacher = inputs.pop("logits"), inputs.pop("teacher_logits")["teacher"]
    arrays = {name: value for name, value in inputs.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in inputs.items() if name not in arrays}
    losses = all_losses()

    def loss(logits: jax.Array, teacher: jax.Array, arrays: dict[str, jax.Array], axis: str | None = None) -> tuple:
        found = monolithic_loss(
            logits, losses, teacher_logits=teacher, vocab_axis=axis, implementation="xla", **static, **arrays
        )
        return found.loss, found.aux.losses

    columns = P(None, None, "model")
    specs = {"mesh": mesh, "in_specs": (columns, columns, P())}
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits, teacher, arrays)
    inside = jax.shard_map(
        lambda *given: jax.value_and_grad(loss, has_aux=True)(*given, "model"), **specs, out_specs=((P(), P()), columns)
    )
    outside = jax.value_and_grad(
        jax.shard_map(lambda *given: loss(*given, "model"), **specs, out_specs=P()), has_aux=True
    )
    split = NamedSharding(mesh, columns)
    given = jax.device_put((logits, teacher, arrays), (split, split, NamedSharding(mesh, P())))
    plain = jax.value_and_grad(loss, has_aux=True)
    for name, run in (("inside", inside), ("outside", outside), ("plain jit", plain)):
        found = jax.jit(run)(*given)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            scale = max(1.0, float(jnp.max(jnp.abs(b))))
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=5e-6 * scale, err_msg=name)
        print(f"JAX, {name}: equals the unsharded call", flush=True)


def run_parts() -> None:
    """Starts two ranks and the JAX part, each with a time limit; every process has ended when this returns."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    environment.update(XLA_PYTHON_CLIENT_PREALLOCATE="false", NCCL_NVLS_ENABLE="0")
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        environment.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        script, rendezvous = str(Path(__file__)), str(Path(folder) / "rendezvous")
        parts = [[[script, "rank", str(rank), rendezvous] for rank in range(RANKS)], [[script, "jax"]]]
        for part in parts:
            processes = [subprocess.Popen([sys.executable, *command], env=environment) for command in part]
            try:
                for process in processes:
                    process.wait(SECONDS)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            codes = [process.returncode for process in processes]
            assert not any(codes), f"{part[0][1:2]}: exit codes {codes}"


@pytest.mark.skipif(gpu_count() < RANKS, reason=f"needs {RANKS} GPUs, found {gpu_count()}")
def test_two_gpus() -> None:
    run_parts()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        torch_rank(int(sys.argv[2]), sys.argv[3])
    elif sys.argv[1:2] == ["jax"]:
        jax_part()
    else:
        run_parts()
        print("two GPUs: all passed")
