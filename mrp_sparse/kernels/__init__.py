"""Kernels that multiply with a packed weight, and the choice among them."""
