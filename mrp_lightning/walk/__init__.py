"""A model, block by block: what to prune, on which inputs, in which order. Needs torch alone.

`plan` lists blocks and layers, `walks` run one block at a time, `calibration` collects Hessians,
and `sequential` prunes with them.
"""
