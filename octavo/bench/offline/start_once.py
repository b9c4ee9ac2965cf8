"""The process that `startup` measures, which starts octavo once: ``python -m
octavo.bench.offline.start_once SETTINGS``.

SETTINGS are the keyword arguments of ``LLM`` as JSON. Prints a line of JSON when the engine is
ready, with the seconds of each phase of loading, and another one with the first token.
`octavo.bench.offline.startup` has the clock.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from octavo import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    print(json.dumps(llm.load_seconds), flush=True)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate(["Hello"], params, use_tqdm=False)
    print(json.dumps({"engine": llm.engine_info()}), flush=True)


if __name__ == "__main__":
    main()
