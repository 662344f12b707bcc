"""Run a model block by block and accumulate the Hessians of its layers. It needs only torch.

`walk_choice` finds the right walk for a model, `walks` run one block at a time, `hessians` collects
the inputs of its layers without padding, and `offload` keeps the other blocks in CPU memory.
"""
