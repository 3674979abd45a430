"""The demo's language model, as weights: an embedding, causal mixing of the last tokens, one MLP, and a tied head.

It is small on purpose: what is left is the head, as in a large model with a large vocabulary.
"""

from __future__ import annotations

import numpy as np

WINDOW = 8
Weights = dict[str, np.ndarray]


def initial_weights(vocab: int, width: int, seed: int) -> Weights:
    """Float32 weights that both frameworks start from."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return random.normal(0.0, scale, shape).astype(np.float32)

    return {
        "embedding": normal(vocab, width, scale=0.02),
        "mixing": normal(WINDOW, width, scale=WINDOW**-0.5),
        "inner": normal(width, 4 * width, scale=width**-0.5),
        "outer": normal(4 * width, width, scale=(4 * width) ** -0.5),
        "gain": np.ones(width, np.float32),
    }


#: Adam, the same numbers in both
LEARNING_RATE, BETA_1, BETA_2, EPSILON = 3e-3, 0.9, 0.99, 1e-8
