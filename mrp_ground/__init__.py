"""The ground floor, on which the runtime and the pruner stand: errors, arguments, JSON, grids.

It imports nothing of ours, and importing it does nothing else: no hook is installed and no operator
registered. It comes with the distribution `mrp-sparse`.
"""
