"""What multiplies with a packed weight on a CUDA device, and what chooses among them."""
