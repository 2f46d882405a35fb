"""Compute kernels: the torch reference beside faster forms, one dispatch."""
