"""Run a model block by block and accumulate the Hessians of its layers. It needs only torch.

`walk_choice` finds the right walk for a model, `walks` run one block at a time, `hessians` sums up
the inputs of its layers, `padding` separates tokens from padding in them, and `offload` keeps the
other blocks in CPU memory.
"""
