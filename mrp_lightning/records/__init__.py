"""The files that describe a model in its directory: its report, its evaluation and its card."""
