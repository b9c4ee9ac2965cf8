"""One start of octavo, told from inside: ``python -m octavo.bench.offline.start_once SETTINGS``.

SETTINGS are the keyword arguments of ``LLM`` as JSON. Prints a line of JSON when the engine is
ready, and another one with the first token. `octavo.bench.offline.startup` has the clock.
"""

from __future__ import annotations

import json
import sys
import time

_BEGIN = time.perf_counter()


def main() -> None:
    from octavo import LLM, SamplingParams

    imported = time.perf_counter()
    llm = LLM(**json.loads(sys.argv[1]))
    loaded = time.perf_counter()
    print(json.dumps({"import_s": imported - _BEGIN, "load_s": loaded - imported}), flush=True)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate(["Hello"], params, use_tqdm=False)
    print(json.dumps({"engine": llm.engine_info()}), flush=True)


if __name__ == "__main__":
    main()
