"""How fast kernels, layers and models are."""
