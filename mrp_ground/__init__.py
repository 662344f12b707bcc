"""The code that the runtime and the pruner share: errors, checks of arguments, JSON files.

It imports no other package of this project, and importing it has no effect: no hook is installed
and no operator registered. It comes with the distribution `mrp-sparse`.
"""
