"""Marks on tensors that were read from a file, by which a rearranged one is recognised.

Some classes of vLLM permute the rows of a weight between the file and the layer (BLOOM, Falcon).
The places of a packed weight would follow, its values would not. The mark is on the storage: views
keep it, such as the transpose with which GPT-2 reads its layers, and copies lose it.
"""

from torch import Tensor

_MARK = "_mrp_sparse_from_file"


def mark(tensor: Tensor) -> None:
    """Mark a tensor as read from a file."""
    setattr(tensor.untyped_storage(), _MARK, True)


def is_from_file(tensor: Tensor) -> bool:
    """Return whether a tensor is a marked one, or a view of one."""
    return hasattr(tensor.untyped_storage(), _MARK)


def as_in_file(tensor: Tensor) -> Tensor:
    """Return a tensor that was read from a file, or its transpose, in the shape in the file."""
    return tensor if tensor.is_contiguous() else tensor.t()
