"""All of it inside Lightning: the module, the data module, the trainer and its predict loop."""
