"""Checks for the optional packages PyTorch, transformers, cryptography and mcp.

PyTorch is only needed by GPUs and by models without native kernels, transformers by families that
octavo lacks, cryptography by connections between machines, mcp by tools of MCP servers.
"""

from __future__ import annotations

import importlib.util

from octavo.base.errors import MissingPackageError

ADD_TORCH = "pip install 'octavo[torch]'"
ADD_GPU = "pip install 'octavo[gpu]'"
NO_TORCH = f"PyTorch is needed, and not installed: {ADD_TORCH}"


ADD_TRANSFORMERS = "pip install 'octavo[transformers]'"
ADD_MACHINES = "pip install 'octavo[machines]'"
ADD_MCP = "pip install 'octavo[mcp]'"


def has_torch() -> bool:
    """Return whether PyTorch is installed, without importing it, which takes a second."""
    return importlib.util.find_spec("torch") is not None


def has_transformers() -> bool:
    """Return whether transformers, which imports PyTorch, is installed."""
    return has_torch() and importlib.util.find_spec("transformers") is not None


def need_transformers(what: str) -> None:
    """Check like ``need_torch``, before a module is imported that needs transformers."""
    if not has_transformers():
        raise MissingPackageError(
            f"{what}: transformers is needed, and not installed: {ADD_TRANSFORMERS}"
        )


def need_torch(what: str) -> None:
    """Check before a module is imported that needs PyTorch; ``what`` is the feature that needs it.

    Raises:
        MissingPackageError: it is not installed; names the command that adds it.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise  # it is installed, but broken
        raise MissingPackageError(f"{what}: {NO_TORCH}") from None


def need_cryptography(what: str) -> None:
    """Check like ``need_torch``, before a certificate is made."""
    if importlib.util.find_spec("cryptography") is None:
        raise MissingPackageError(
            f"{what}: the package cryptography is needed, and not installed: {ADD_MACHINES}"
        )


def need_mcp(what: str) -> None:
    """Check like ``need_torch``, before an MCP server is started."""
    if importlib.util.find_spec("mcp") is None:
        raise MissingPackageError(
            f"{what}: the package mcp is needed, and not installed: {ADD_MCP}"
        )
