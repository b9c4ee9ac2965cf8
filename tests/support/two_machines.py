"""Two machines in namespaces of the network, with a cable between them that can be cut:

    unshare -rnm python two_machines.py DOES ...

is on one of them (10.77.0.1); ``ON_THE_OTHER`` runs a command on the other one (10.77.0.2). What
it `DOES`: ``answers MODEL TP`` prints the answers of a pipeline over both machines, of stages of so
many ranks, ``serves MODEL TP`` those of a server with one; ``cut MODEL TP`` cuts the cable between
two requests, and prints how the engine and its other ranks have ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

HERE, THERE = "10.77.0.1", "10.77.0.2"
ON_THE_OTHER = "ip netns exec other"
PROMPTS = [[5, 9, 13, 21], [7, 8], list(range(20, 90))]
SECONDS = 60.0  # of which none is waited for where all is well


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def lay_cable() -> None:
    run("mount -t tmpfs none /run")
    run("mkdir -p /run/netns")
    run("ip netns add other")
    run("ip link add here type veth peer name there")
    run("ip link set there netns other")
    for on, device, address in (("", "here", HERE), (ON_THE_OTHER, "there", THERE)):
        run(f"{on} ip addr add {address}/24 dev {device}")
        run(f"{on} ip link set {device} up")
        run(f"{on} ip link set lo up")


def open_pipeline(model: str, tp: int):
    from octavo import LLM

    return LLM(
        model,
        tensor_parallel_size=tp,
        pipeline_parallel_size=2,
        stage_command=(f"{ON_THE_OTHER} {sys.executable}",),
        stage_address=HERE,
        threads=1,
        max_model_len=128,
    )


def answers(llm) -> list[list[int]]:
    from octavo import SamplingParams

    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params)
    return [output.outputs[0].token_ids for output in outputs]


def remote_ranks() -> list[str]:
    listed = subprocess.run(
        ["ip", "netns", "pids", "other"], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()


def cut(model: str, tp: int) -> dict:
    with open_pipeline(model, tp) as llm:
        before, ranks = answers(llm), remote_ranks()
        run("ip link set here down")
        raised = []

        def ask() -> None:
            try:
                answers(llm)
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(SECONDS)
        deadline = time.monotonic() + SECONDS
        while remote_ranks() and time.monotonic() < deadline:
            time.sleep(0.1)
        return {
            "answers": before,
            "ranks": len(ranks),
            "raised": raised,
            "left": len(remote_ranks()),
        }


def serves(model: str, tp: int) -> dict:
    from live_server import LiveServer

    flags = ("--pipeline-parallel-size", "2", "--stage-address", HERE, "--threads", "1")
    flags = ("--tensor-parallel-size", str(tp), *flags)
    command = ("--stage-command", f"{ON_THE_OTHER} {sys.executable}")
    with LiveServer(model, "--port", "0", "--max-model-len", "128", *flags, *command) as server:
        body = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        said = [
            server.fetch("/v1/completions", body).json()["choices"][0]["text"] for _ in range(2)
        ]
        return {"answers": said, "ranks": len(remote_ranks())}


def main() -> None:
    does, model, tp = sys.argv[1], sys.argv[2], int(sys.argv[3])
    lay_cable()
    if does == "answers":
        with open_pipeline(model, tp) as llm:
            print(json.dumps({"answers": answers(llm), "ranks": len(remote_ranks())}))
    else:
        print(json.dumps({"serves": serves, "cut": cut}[does](model, tp)))


if __name__ == "__main__":
    main()
