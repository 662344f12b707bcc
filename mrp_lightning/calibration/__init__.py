"""Batches → Hessians, block by block. Needs torch alone.

`choice` finds the walk that is right for a model, `walks` run one block at a time, `hessians`
collects what its layers are given, without the padding, and `offload` keeps the other blocks away.
"""
