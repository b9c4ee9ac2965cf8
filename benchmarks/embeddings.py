"""Embeddings a second, beside sentence-transformers and llama-server, taking turns.

    python benchmarks/embeddings.py [MODEL] [--gguf FILE ...] [--rounds 5] [--texts 512]
        [--sentence-transformers PYTHON] [--llama-server PROGRAM]

MODEL is a folder of sentence-transformers (or an alias), ``--gguf`` files of the same model, by
`octavo quantize MODEL OUT.gguf --method gguf --type Q8_0`. Every contender embeds the same texts
in each round, of 4 to 120 words: octavo and sentence-transformers in a process, and octavo and
llama-server over HTTP, each with the files that it reads. Printed are medians of texts and tokens a
second, the processor time that each took for them, which others on the machine change less, and the
floor: the operations of the model's matrices.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from octavo import LLM, hub

_WORDS = re.findall(r"\b[a-z]{2,12}\b", Path(__file__).read_text())
_TEXTS_OF_REQUEST = 32
_CONNECTIONS = 4
_START_SECONDS = 120.0

_SENTENCE_TRANSFORMERS = """
import json, sys, torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(int(sys.argv[2]))
model = SentenceTransformer(sys.argv[1], device="cpu")
print("ready", flush=True)
for line in sys.stdin:
    model.encode(json.loads(line), batch_size=32)
    print("done", flush=True)
"""


class Contender(Protocol):
    """Something that embeds texts. ``pid``: of the process that does it."""

    name: str
    pid: int

    def embed(self, texts: Sequence[str]) -> None: ...


@dataclass
class InProcess:
    """octavo, in this process."""

    name: str
    llm: LLM
    pid: int = field(default_factory=os.getpid)

    def embed(self, texts: Sequence[str]) -> None:
        outputs = self.llm.embed(list(texts), truncate_prompt_tokens=-1)
        assert all(output.error is None for output in outputs)


@dataclass
class Worker:
    """sentence-transformers, in a process of its own."""

    name: str
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def embed(self, texts: Sequence[str]) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(list(texts)) + "\n")
        self.process.stdin.flush()
        if self.process.stdout.readline() != "done\n":
            raise SystemExit(f"{self.name} has ended")


@dataclass
class Server:
    """A server with OpenAI's route, over a few connections."""

    name: str
    url: str
    pid: int

    def embed(self, texts: Sequence[str]) -> None:
        parts = [texts[i : i + _TEXTS_OF_REQUEST] for i in range(0, len(texts), _TEXTS_OF_REQUEST)]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            list(pool.map(self._request, parts))

    def _request(self, texts: Sequence[str]) -> None:
        body = {"input": list(texts), "encoding_format": "base64"}
        request = urllib.request.Request(
            f"{self.url}/v1/embeddings",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            assert len(json.load(answer)["data"]) == len(texts)


def make_texts(count: int, seed: int) -> list[str]:
    """Texts of 4 to 120 words, most of them short: none has more than 256 tokens."""
    rng = random.Random(seed)
    lengths = [min(120, 4 + int(rng.expovariate(1 / 40))) for _ in range(count)]
    return [" ".join(rng.choices(_WORDS, k=length)) for length in lengths]


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of those that it has started, so far."""
    total, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            tasks = Path(f"/proc/{one}/task").iterdir()
            waiting += [
                int(child) for task in tasks for child in (task / "children").read_text().split()
            ]
        except FileNotFoundError:
            continue
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


@contextmanager
def started(command: Sequence[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, text=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"{process.args} did not start")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def contenders(args: argparse.Namespace, stack: ExitStack) -> list[Contender]:
    folder, threads = str(hub.resolve(args.model)), str(args.threads)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    found: list[Contender] = []
    for path in [folder, *args.gguf]:
        llm = stack.enter_context(LLM(path, threads=args.threads, max_model_len=256))
        found.append(InProcess(f"octavo {Path(path).name}", llm))
    if args.sentence_transformers is not None:
        process = stack.enter_context(
            started(
                [args.sentence_transformers, "-c", _SENTENCE_TRANSFORMERS, folder, threads],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("sentence-transformers did not start")
        found.append(Worker("sentence-transformers", process))
    for path in args.gguf:
        names = ["octavo serve", *(["llama-server"] if args.llama_server is not None else [])]
        for name in names:
            port = str(free_port())
            url = f"http://127.0.0.1:{port}"
            if name == "llama-server":
                command = [args.llama_server, "-m", path, "--embeddings", "--pooling", "mean"]
                command += [
                    "-t",
                    threads,
                    "-c",
                    "8192",
                    "-b",
                    "2048",
                    "-ub",
                    "2048",
                    "--port",
                    port,
                ]
            else:
                command = [sys.executable, "-m", "octavo", "serve", path, "--threads", threads]
                command += ["--max-model-len", "512", "--port", port]
            process = stack.enter_context(started(command, **quiet))
            wait_for(url, process)
            found.append(Server(f"{name} {Path(path).name}", url, process.pid))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="embeddings a second, beside other programs")
    parser.add_argument("model", nargs="?", default="minilm")
    parser.add_argument("--gguf", action="append", default=[], metavar="FILE")
    parser.add_argument("--sentence-transformers", metavar="PYTHON")
    parser.add_argument("--llama-server", metavar="PROGRAM", default=shutil.which("llama-server"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    with ExitStack() as stack:
        all_of_them = contenders(args, stack)
        first = all_of_them[0]
        assert isinstance(first, InProcess)
        tokenizer = first.llm.get_tokenizer()
        probe = first.llm._text_engine.engine.executor.probe()
        num_operations = 2 * sum(matrix.num_params for matrix in probe.matrices())
        times: dict[str, list[tuple[float, float, float, float]]] = {}
        for each in all_of_them:
            each.embed(make_texts(32, seed=-1))
        for number in range(args.rounds):
            texts = make_texts(args.texts, number)
            num_tokens = sum(min(256, len(tokenizer.encode(text))) for text in texts)
            for each in all_of_them:
                cpu, begin = cpu_seconds(each.pid), time.perf_counter()
                each.embed(texts)
                seconds = time.perf_counter() - begin
                used = cpu_seconds(each.pid) - cpu
                row = args.texts / seconds, num_tokens / seconds, num_tokens / used, used
                times.setdefault(each.name, []).append(row)
        print(f"{args.texts} texts a round, {args.rounds} rounds, {args.threads} threads")
        print(f"floor: {num_operations / 1e6:.1f} million operations a token in its matrices")
        print(f"{'':40} {'texts/s':>9} {'range':>15} {'tokens/s':>10} {'tokens per CPU s':>17}")
        for name, rows in times.items():
            texts_s, tokens_s, per_cpu, _ = (
                statistics.median(column) for column in zip(*rows, strict=True)
            )
            low, high = min(row[0] for row in rows), max(row[0] for row in rows)
            spread = f"{low:,.0f} - {high:,.0f}"
            print(f"{name:40} {texts_s:9,.0f} {spread:>15} {tokens_s:10,.0f} {per_cpu:17,.0f}")


if __name__ == "__main__":
    main()
