"""All layers of a model are pruned in order, written and reported.

It needs only torch, safetensors, filelock and pydantic.
"""
