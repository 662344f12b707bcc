"""The files beside a model: the report of its pruning, its evaluation, its card."""
