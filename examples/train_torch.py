"""A plain training step in PyTorch: the head of a model with several losses and their metrics.

python examples/train_torch.py
"""

from __future__ import annotations

import torch

from duohead import CrossEntropy, EntropyLoss, ZLoss
from duohead_torch import monolithic_loss

VOCAB, WIDTH, TOKENS = 1000, 32, 64


def main(steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(VOCAB, (TOKENS + 1,))
    # Nothing is shifted for you: the label of a row is the next token. A negative label is ignored.
    inputs, labels = tokens[:-1], tokens[1:].clone()
    labels[:4] = -100

    found = []
    for step in range(steps):
        # Weights may change at every step: they are runtime values and recompile nothing.
        losses = {
            "ce": CrossEntropy(label_smoothing=0.05),
            "z": ZLoss(weight=1e-4),
            "bonus": EntropyLoss(weight=-0.01 * (1 - step / steps)),
        }
        loss, aux = monolithic_loss(model(inputs), losses, labels=labels, metrics=("accuracy", "perplexity"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        if step % 5 == 0 or step == steps - 1:
            reported = {"total": loss.detach(), **aux.losses, **aux.metrics}
            print(f"step {step:3}", *(f"{name} {float(value):.4f}" for name, value in reported.items()), sep="  ")
    return found


if __name__ == "__main__":
    main()
