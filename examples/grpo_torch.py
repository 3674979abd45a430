"""GRPO in PyTorch: policy loss, KL to a reference and entropy bonus from one softmax. A toy policy learns to count.

python examples/grpo_torch.py --steps 100 --plot docs/grpo.png
"""

from __future__ import annotations

import numpy as np
import torch
import toy_policy as toy

from duohead import GRPO, EntropyLoss
from duohead_torch import monolithic_loss, token_statistics

LOSSES = {"rl": GRPO(epsilon_high=0.28, beta=0.01), "bonus": EntropyLoss(weight=-0.003)}
EPOCHS, RATE = 2, 2.0
Weights = dict[str, torch.Tensor]


def logits_of(weights: Weights, previous: torch.Tensor) -> torch.Tensor:
    return torch.tanh(weights["token"][previous] + weights["position"]) @ weights["out"]


@torch.no_grad()
def sample(weights: Weights, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One completion per prompt."""
    found = [prompts]
    for t in range(toy.LENGTH):
        hidden = torch.tanh(weights["token"][found[-1]] + weights["position"][t])
        found.append(torch.multinomial((hidden @ weights["out"]).softmax(-1), 1, generator=generator)[:, 0])
    return torch.stack(found[1:], dim=1)


@torch.no_grad()
def logprobs(weights: Weights, previous: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
    return token_statistics(logits_of(weights, previous), completions, statistics=("logprob",)).logprob


def train(steps: int, implementation: str = "auto", seed: int = 0) -> dict[str, list[float]]:
    """Trains from scratch; the curves of reward and metrics, one value a step."""
    weights = {name: torch.tensor(value, requires_grad=True) for name, value in toy.parameters(seed).items()}
    reference = {name: value.detach().clone() for name, value in weights.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    r, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    curves: dict[str, list[float]] = {"reward": [], "kl_ref": [], "entropy": [], "clipped": []}
    for step in range(steps):
        prompts = toy.prompts_of_groups(r)
        completions = sample(weights, torch.tensor(prompts), generator)
        rewards = toy.reward(prompts, completions.numpy())
        previous = torch.tensor(toy.previous(prompts, completions.numpy()))
        old = logprobs(weights, previous, completions)
        batch = {
            "labels": completions,
            "advantages": torch.tensor(toy.group_advantages(rewards)),  # one per sequence
            "segment_ids": torch.tensor(toy.segment_ids(len(prompts))),
            "old_logprobs": old,
            "ref_logprobs": logprobs(reference, previous, completions),
        }
        for _ in range(EPOCHS):
            loss, aux = monolithic_loss(logits_of(weights, previous), LOSSES, **batch, implementation=implementation)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curves["reward"].append(float(rewards.mean()))
        for name, metric in (("kl_ref", "kl_ref"), ("entropy", "entropy"), ("clipped", "clipped_ratio_fraction")):
            curves[name].append(float(aux.metrics[f"rl/{metric}"]))
        toy.progress(step, steps, {name: values[-1] for name, values in curves.items()})
    return curves


if __name__ == "__main__":
    options = toy.arguments("GRPO on a toy policy, in PyTorch", 100, "docs/grpo.png")
    toy.plot(options.plot, "GRPO on a counting task", train(options.steps))
