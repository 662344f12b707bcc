"""The commands of `mrp-lightning`, one module each."""
