"""PyTorch, which only GPUs need, and models that the native kernels do not run."""

from __future__ import annotations

import importlib.util

from octavo.errors import MissingPackageError

ADD_TORCH = "pip install 'octavo[torch]'"
ADD_GPU = "pip install 'octavo[gpu]'"
NO_TORCH = f"PyTorch is needed, and not installed: {ADD_TORCH}"


def has_torch() -> bool:
    """Whether it is installed: without importing it, which takes a second."""
    return importlib.util.find_spec("torch") is not None


def need_torch(what: str) -> None:
    """Called before a module is imported that stands on PyTorch; ``what`` is what needs it.

    MissingPackageError, with the command that adds it, if it is not installed.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise  # it is there, and in pieces
        raise MissingPackageError(f"{what}: {NO_TORCH}") from None
