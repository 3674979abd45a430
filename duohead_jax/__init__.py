"""duohead for JAX: one softmax, every loss, one gradient."""

from duohead_jax.api import make_loss, monolithic_loss, monolithic_loss_and_grad, token_statistics
from duohead_jax.dlpack import from_torch

__all__ = ["from_torch", "make_loss", "monolithic_loss", "monolithic_loss_and_grad", "token_statistics"]
