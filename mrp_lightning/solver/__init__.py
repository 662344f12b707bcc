"""One weight matrix: from a Hessian to the pruned, compensated weight. Needs torch alone.

`hessian` sums up calibration inputs, `damping` prepares their Hessian, `masks` choose what goes,
`sweep` and `optimum` make up for it, and `pruning` puts them together.
"""
