"""All of it inside Lightning: the module, the trainer and its predict loop."""
