"""A language model → windows of text that it writes itself, to calibrate on."""
