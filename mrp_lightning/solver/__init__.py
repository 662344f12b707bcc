"""The solver prunes one weight matrix by its Hessian, and compensates. It needs only torch.

`hessian` sums up calibration inputs, checks their Hessian and factorises it. A `recipe` holds the
choices: `masks` choose the weights to remove by a pattern of `patterns`, `compensations` move the
others, `quantisation` puts them on a grid. `problem` is one layer, and `pruning` runs all parts.
`columns` removes whole columns.
"""
