"""Pruning and evaluation in Lightning: the module, the trainer and its predict loop."""
