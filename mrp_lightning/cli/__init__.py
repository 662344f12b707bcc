"""The command line that all commands share: options, YAML files, and messages on mistakes."""
