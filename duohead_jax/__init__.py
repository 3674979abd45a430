"""duohead for JAX: one softmax, every loss, one gradient."""

from duohead_jax.api import make_loss, monolithic_loss, monolithic_loss_and_grad, token_statistics

__all__ = ["make_loss", "monolithic_loss", "monolithic_loss_and_grad", "token_statistics"]
