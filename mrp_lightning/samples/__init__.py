"""A language model writes the windows of text that it is calibrated on."""
