"""duohead for JAX: one softmax, every loss, one gradient."""

from duohead_jax.api import make_loss, monolithic_loss, monolithic_loss_and_grad, token_statistics
from duohead_jax.dlpack import from_torch
from duohead_jax.sharding import combine_metrics, global_counts

__all__ = [
    "combine_metrics",
    "from_torch",
    "global_counts",
    "make_loss",
    "monolithic_loss",
    "monolithic_loss_and_grad",
    "token_statistics",
]
