"""A whole model on one back-end: our operator, or the tensor subclasses of torch and torchao."""
