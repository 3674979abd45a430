"""The robustness suite: hard inputs, every implementation, and tolerances that are derived."""
