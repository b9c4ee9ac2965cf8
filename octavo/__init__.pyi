# Where the names of the package are: type checkers read it, and at run time `lazy_exports`.

from octavo.async_llm import (
    AsyncEngineArgs as AsyncEngineArgs,
)
from octavo.async_llm import (
    AsyncLLM as AsyncLLM,
)
from octavo.async_llm import (
    AsyncLLMEngine as AsyncLLMEngine,
)
from octavo.base.errors import OctavoError as OctavoError
from octavo.core.sampling_params import (
    RequestOutputKind as RequestOutputKind,
)
from octavo.core.sampling_params import (
    SamplingParams as SamplingParams,
)
from octavo.core.structured_outputs import (
    StructuredOutputs as StructuredOutputs,
)
from octavo.core.structured_outputs import (
    StructuredOutputsParams as StructuredOutputsParams,
)
from octavo.llm import LLM as LLM
from octavo.lora.request import LoRARequest as LoRARequest
from octavo.serving.beam_search import (
    BeamSearchOutput as BeamSearchOutput,
)
from octavo.serving.beam_search import (
    BeamSearchParams as BeamSearchParams,
)
from octavo.serving.beam_search import (
    BeamSearchSequence as BeamSearchSequence,
)
from octavo.serving.outputs import (
    CompletionOutput as CompletionOutput,
)
from octavo.serving.outputs import (
    RequestOutput as RequestOutput,
)
from octavo.settings.engine import EngineArgs as EngineArgs
from octavo.settings.engine import EngineConfig as EngineConfig

__version__: str
