# Names of the package for type checkers; at run time `__getattr__` imports each when it is used.

from octavo.async_llm import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine
from octavo.base.errors import OctavoError
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.llm import LLM
from octavo.serving.outputs import CompletionOutput, RequestOutput
from octavo.settings.engine import EngineArgs, EngineConfig

__version__: str

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "LLM",
    "OctavoError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]
