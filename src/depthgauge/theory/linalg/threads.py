"""The number of threads that suits the size of the matrices.

Certificates, attacks and claims consist of many products of small matrices. Splitting such a product over threads costs
more than the product, and on a loaded machine the threads wait for each other: a certificate of a network of width 16
took over 110 seconds with the default threads and 5 seconds with one thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 128
"""Matrices up to this width are computed by one thread."""


@contextmanager
def threads_for(width: int) -> Iterator[None]:
    """Run the block with one torch thread if its matrices have at most `SMALL` columns, then restore the number."""
    before = torch.get_num_threads()
    if width > SMALL or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
