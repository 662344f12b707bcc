"""One weight matrix: from a Hessian to the pruned, compensated weight. Needs torch alone.

`hessian` sums up calibration inputs, `input_hessian` checks their Hessian and `damping` factorises
it. A `recipe` says how to prune: `masks` choose what goes, `compensations` and `exact` make up for
it, and `pruning` puts them together.
"""
