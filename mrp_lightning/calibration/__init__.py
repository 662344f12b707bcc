"""Batches → Hessians, block by block. Needs torch alone.

`choice` finds the walk that is right for a model, `walks` run one block at a time, and `hessians`
collects what its layers are given, without the padding.
"""
