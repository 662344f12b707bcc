"""The files that describe a model beside it: its report, its evaluation and its card."""
