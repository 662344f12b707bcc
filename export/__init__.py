"""From 2:4 zeros to sparse kernels."""
