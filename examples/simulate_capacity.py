"""How many users of Llama 3.1 8B fit one card of 80 GB? The real scheduler, in virtual time."""

from octavo.cost.open_spec import open_spec
from octavo.sim.settings import FleetSettings
from octavo.sim.setup import prepare
from octavo.workload.settings import LoadSettings, Workload


def main() -> None:
    model = open_spec("llama-3.1-8b")
    server = FleetSettings(hardware="h100-sxm", profile="vllm")
    chats = Workload(num_prompts=1000, input_len=500, output_len=200, random_length_cv=0.5)
    for requests_per_second in (5, 10, 20, 40, 80):
        load = LoadSettings(request_rate=requests_per_second)
        report = prepare(model, server, chats, load).run().report
        ttft = report.metrics.latencies["ttft"]
        print(
            f"{requests_per_second:>3}/s: TTFT p50 {ttft.median * 1e3:,.0f}, "
            f"p99 {ttft.percentiles[99.0] * 1e3:,.0f} ms ({report.saturation.verdict})"
        )


if __name__ == "__main__":
    main()
