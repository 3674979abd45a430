"""A small model with a vocabulary-sharded head on four processes, its curve beside the unsharded run's.

python examples/vocab_parallel_torch.py [STEPS [IMPLEMENTATION]]
"""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from duohead import CrossEntropy, ZLoss
from duohead_torch import monolithic_loss

VOCAB, WIDTH, TOKENS, RANKS = 1003, 32, 64, 4
LOSSES = {"ce": CrossEntropy(label_smoothing=0.05), "z": ZLoss(weight=1e-3)}


class CopyToShards(torch.autograd.Function):
    """The hidden states are the same on all ranks; each shard of the head gives a part of their gradient."""

    @staticmethod
    def forward(ctx: object, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


def train(steps: int, implementation: str, rank: int = 0, ranks: int = 1) -> list[float]:
    """The losses of a run; with several ranks each holds ceil(VOCAB / ranks) columns of the head, the last fewer."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(VOCAB, WIDTH)
    weight = torch.randn(WIDTH, VOCAB) / WIDTH**0.5
    columns = -(-VOCAB // ranks)
    head = torch.nn.Parameter(weight[:, rank * columns : (rank + 1) * columns].clone())
    optimizer = torch.optim.AdamW([*embedding.parameters(), head], lr=1e-2)
    tokens = torch.randint(VOCAB, (TOKENS + 1,))
    inputs, labels = tokens[:-1], tokens[1:]
    group = dist.group.WORLD if ranks > 1 else None

    curve = []
    for step in range(steps):
        hidden = embedding(inputs)
        logits = (CopyToShards.apply(hidden) if ranks > 1 else hidden) @ head
        # One all-gather of a few numbers per token, whatever the losses; the backward needs none.
        loss, aux = monolithic_loss(
            logits,
            LOSSES,
            labels=labels,
            metrics=("accuracy",),
            vocab_group=group,
            vocab_size=VOCAB,
            implementation=implementation,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
        if rank == 0 and (step % 5 == 0 or step == steps - 1):
            accuracy = float(aux.metrics["head/accuracy"])
            print(f"{ranks} rank(s)  step {step:3}  loss {curve[-1]:.6f}  accuracy {accuracy:.3f}", flush=True)
    return curve


def run_rank(rank: int, steps: int, port: int, ranks: int, implementation: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    sharded = train(steps, implementation, rank, ranks)
    whole = train(steps, implementation) if rank == 0 else sharded
    dist.barrier()
    dist.destroy_process_group()
    off = max(abs(a - b) for a, b in zip(sharded, whole, strict=True))
    if off > 1e-5:
        raise SystemExit(f"the sharded curve is off by {off}")
    if rank == 0:
        print(f"largest difference of the two curves: {off:.2g}")


def main(steps: int = 20, implementation: str = "auto", ranks: int = RANKS) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, (steps, port, ranks, implementation), nprocs=ranks)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:2]), *sys.argv[2:3])
