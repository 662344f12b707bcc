"""The solver prunes one weight matrix by its Hessian, and compensates. It needs only torch.

`hessian` sums up calibration inputs, `input_hessian` checks their Hessian and `damping` factorises
it. A `recipe` says how to prune: `masks` choose the weights to remove, `compensations` and `exact`
move the others to make up for them, and `pruning` puts these parts together.
"""
