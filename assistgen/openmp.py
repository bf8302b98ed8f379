"""
torch's own OpenMP threads, for kernels of ours: they are awake from torch's work, and others would be in their way.

By GNU's entry, which torch's Linux builds have; elsewhere there is none, and everything goes torch's way.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from typing import Any

import torch


_ruled_out = threading.Event()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ruled_out.set)  # the threads don't survive a fork


def rule_out() -> None:
    """No kernel of ours runs any more in this process."""
    _ruled_out.set()


def is_ruled_out() -> bool:
    if not _ruled_out.is_set():
        try:
            _library()
        except (OSError, AttributeError):  # another kind of threads
            _ruled_out.set()
    return _ruled_out.is_set()


def run_parallel(body: int, job: int) -> None:
    """All of torch's threads run the C function at the address `body`, which is given the address `job`."""
    _library().GOMP_parallel(body, job, torch.get_num_threads(), 0)


@cache
def barrier() -> int:
    """The address of the function by which threads that run a body wait for each other."""
    return ctypes.cast(_library().GOMP_barrier, ctypes.c_void_p).value or 0


@cache
def _library() -> Any:
    library = ctypes.CDLL(torch._C.__file__)
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library
