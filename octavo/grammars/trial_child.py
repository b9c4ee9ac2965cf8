"""The trial of one constraint in this process, and the bounds of such a process."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from octavo.base.errors import ConstraintError
from octavo.core.structured_outputs import StructuredOutputs
from octavo.grammars.compiler import compile_source
from octavo.grammars.sampled_masks import MAX_MASK_SECONDS, SampledMasks
from octavo.grammars.sources import source_of
from octavo.grammars.tried_grammar import TriedGrammar
from octavo.grammars.vocabulary import GrammarVocabulary

# Of memory that a process may write to beside what it shares. The stack is smaller than that of the
# thread which compiles afterwards.
MAX_BYTES = 256 << 20
STACK_BYTES = 4 << 20


def bound(cpu_seconds: float) -> None:
    """Set the bounds of this process: SIGPROF ends it after so many seconds of a processor."""
    import resource  # which Windows lacks

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        statm = Path("/proc/self/statm").read_text()
        most = int(statm.split()[5]) * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def answer(asked: dict[str, Any], vocabulary: GrammarVocabulary) -> dict[str, Any]:
    """Return ``{grammar}``, with the fields of a `TriedGrammar`, or ``{error, field, reason}``."""
    try:
        return {"grammar": _tried(StructuredOutputs.of(asked), vocabulary).to_dict()}
    except ConstraintError as error:
        return {"error": str(error), "field": error.field, "reason": error.reason}


def _tried(asked: StructuredOutputs, vocabulary: GrammarVocabulary) -> TriedGrammar:
    """Return the grammar of a constraint.

    Raises:
        ConstraintError: it has none, or its masks take too long.
    """
    begun_at, bytes_before = time.thread_time(), _resident_bytes()
    source = source_of(asked, vocabulary.special_ids, vocabulary.stop_token_ids)
    start = compile_source(source, asked, vocabulary)
    seconds, bytes_compiled = time.thread_time() - begun_at, _resident_bytes()
    sampled = SampledMasks(start, vocabulary)
    if sampled.are_slow:
        raise ConstraintError(
            "is too complex: to find the tokens that may come next takes more than "
            f"{1e3 * MAX_MASK_SECONDS:g} ms of a processor",
            f"structured_outputs.{asked.constraint.kind}",
            "too_complex",
        )
    if not bytes_before:
        return TriedGrammar.unmeasured(source, seconds)
    num_bytes = _resident_bytes() - bytes_before
    grown = max(0, num_bytes - (bytes_compiled - bytes_before))
    return TriedGrammar(source, seconds, max(0, num_bytes), grown / max(1, sampled.num_masks))


def _resident_bytes() -> int:
    """Return the memory of this process, without that of files; 0 where the system does not
    tell."""
    try:
        _, resident, of_files, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(of_files)) * os.sysconf("SC_PAGE_SIZE")
