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
    "compare": Command("bench.compare", "configure", "octavo beside other engines, interleaved"),
}
