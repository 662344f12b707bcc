"""One command line for all commands: options, YAML files, and what is wrong with them."""
