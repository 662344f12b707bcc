"""Prune the layers of a model in order, write their weights, and report the results.

This package needs only torch, safetensors, filelock and pydantic.
"""
