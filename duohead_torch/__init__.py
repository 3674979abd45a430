"""duohead for PyTorch: one softmax, every loss, one gradient."""

from duohead_torch.api import monolithic_loss, monolithic_loss_and_grad
from duohead_torch.dlpack import from_jax
from duohead_torch.module import MonolithicLoss
from duohead_torch.statistics import token_statistics
from duohead_torch.vocab_parallel import combine_metrics, global_counts

__all__ = [
    "MonolithicLoss",
    "combine_metrics",
    "from_jax",
    "global_counts",
    "monolithic_loss",
    "monolithic_loss_and_grad",
    "token_statistics",
]
