"""``octavo bench``: a benchmark is a module with ``configure(parser)``, like any command."""

from __future__ import annotations

from octavo.cli import Command

COMMANDS = {
    "latency": Command("bench.latency", "configure", "time one batch: TTFT, TPOT, tokens/s"),
    "throughput": Command("bench.throughput", "configure", "time many requests given at once"),
    "serve": Command("bench.serve", "configure", "put load on a server, open or closed loop"),
    "startup": Command("bench.startup", "configure", "time a start, cold and warm"),
    "sweep": Command("bench.sweep", "configure", "throughput against concurrency, and the knee"),
    "ablation": Command("bench.ablation", "configure", "what each optimisation is worth"),
    "prefix": Command("bench.prefix", "configure", "time to first token on a shared prefix"),
    "spec": Command("bench.spec", "configure", "what speculative decoding is worth"),
    "structured": Command("bench.structured", "configure", "what answers under schemas cost"),
    "compare": Command("bench.compare", "configure", "octavo beside other engines, interleaved"),
}

EXAMPLES = """\
examples:
  octavo bench latency smollm2-135m --input-len 512 --output-len 128
  octavo bench serve --base-url http://127.0.0.1:8000 --request-rate 4 --goodput ttft:500 tpot:50
  octavo bench sweep --concurrency 1,4,16,64 --max-tpot-ms 40
  octavo bench COMMAND --help
"""
