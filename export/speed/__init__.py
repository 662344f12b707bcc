"""The speed of kernels, layers and models is measured and tabulated."""
