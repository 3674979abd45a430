"""The Triton kernel of every plan. This package imports triton and neither torch nor jax; adapters launch it.

A plan becomes straight-line source: ``sweeps`` writes what touches the vocabulary, ``row`` what happens to one row in
between, ``build`` joins them into kernels, ``launch`` says how each is launched.
"""
