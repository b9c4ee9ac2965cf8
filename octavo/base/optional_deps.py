"""PyTorch, which only GPUs need, and models that the native kernels do not run; and transformers,
for families that octavo has not."""

from __future__ import annotations

import importlib.util

from octavo.base.errors import MissingPackageError

ADD_TORCH = "pip install 'octavo[torch]'"
ADD_GPU = "pip install 'octavo[gpu]'"
NO_TORCH = f"PyTorch is needed, and not installed: {ADD_TORCH}"


ADD_TRANSFORMERS = "pip install 'octavo[transformers]'"


def has_torch() -> bool:
    """Whether it is installed: without importing it, which takes a second."""
    return importlib.util.find_spec("torch") is not None


def has_transformers() -> bool:
    """The same of transformers, which imports PyTorch."""
    return has_torch() and importlib.util.find_spec("transformers") is not None


def need_transformers(what: str) -> None:
    """As ``need_torch``, before what stands on transformers."""
    if not has_transformers():
        raise MissingPackageError(
            f"{what}: transformers is needed, and not installed: {ADD_TRANSFORMERS}"
        )


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
