"""The commands that the documentation tells people to type, and a folder in which they work.

README, docs/*.md and the examples of ``--help`` name models that are large, traces that are on
other machines, and loads that take minutes. Here each such file has a small stand-in of its name
(`workbench`), each model is a tiny one (`Stand-ins`), and the settings that make a command long are
given once more, smaller: the last one counts (`smaller`).
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

from made_adapters import write_adapter

from octavo import cli
from octavo.hub import CATALOG, DEFAULT_MODEL

ROOT = Path(__file__).resolve().parent.parent.parent

Command = list[str]


def octavo_commands(text: str) -> list[Command]:
    """The arguments of every ``octavo …`` in lines of shell, comments and pipes apart."""
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        if not re.match(r"\s*(\S+.*\| *)?(\w+=\S+ )?octavo [a-z]", line):
            continue
        words = shlex.split(line, comments=True)
        for segment in " \0 ".join(words).split("\0 | \0"):
            arguments = segment.strip(" \0").split(" \0 ")
            while arguments and "=" in arguments[0]:
                arguments.pop(0)
            if arguments and arguments[0] == "octavo":
                commands.append(arguments[1:])
    return commands


def documented_commands() -> list[Command]:
    commands = []
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        shell = re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        commands += octavo_commands("\n".join(shell))
    for path in (ROOT / "octavo/cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                _, _, examples = node.value.partition("examples:\n")
                commands += octavo_commands(examples)
    return [command for command in commands if "COMMAND" not in command]


# -- stand-ins -------------------------------------------------------------------------------------

ALIASES = (*CATALOG, "big", "small", "big-model", "small-model", "MODEL")
FOLDERS = ("my-model", "model", "Qwen3-0.6B", "Llama-3.2-1B")
GGUF_FILES = ("model.gguf", "model.Q8_0.gguf", "model.Q4_K_M.gguf", "small.gguf")
WORDS = "The quick brown fox jumps over the lazy dog, and the sea is as blue as the sky. "


def fill_workbench(folder: Path, model: Path, gguf: Path) -> None:
    """Every file that a documented command reads, small, in ``folder``."""
    for name in FOLDERS:
        (folder / name).symlink_to(model)
    for name in ("sql", "poems"):
        write_adapter(folder / "adapters" / name, model)
    for name in GGUF_FILES:
        (folder / name).symlink_to(gguf)
    for name in ("wiki.test.raw", "README.md", "chats.txt"):
        (folder / name).write_text(WORDS * 40)
    (folder / "question.txt").write_text(WORDS)
    (folder / "city.json").write_text('{"type": "object"}')
    (folder / "keys.txt").write_text("a-key-of-ann\n")
    for name in ("server.yaml", "octavo-tuned.yaml"):
        (folder / name).write_text(f"model: {model}\nmax-num-seqs: 4\n")
    (folder / "lab.toml").write_text(
        '[[devices]]\nname = "Mine"\nmemory_gib = 8\nbandwidth_gb_s = 100\n'
        "dense_tflops = { fp16 = 10 }\n"
    )
    loads = [[n * n % 97 for n in range(64)]] * 2
    counted = {"model": "tiny", "architecture": "MixtralForCausalLM", "loads": loads}
    (folder / "loads.json").write_text(json.dumps({"format": "octavo expert loads 1", **counted}))
    chat = {
        "messages": [
            {"role": "user", "content": WORDS},
            {"role": "assistant", "content": WORDS},
        ]
    }
    write_lines(folder / "chats.jsonl", [chat] * 8)
    write_lines(folder / "prompts.jsonl", [{"prompt": WORDS}] * 4)
    asked = {"url": "/v1/completions", "body": {"prompt": WORDS, "max_tokens": 4}}
    write_lines(folder / "requests.jsonl", [{"custom_id": str(i), **asked} for i in range(4)])
    write_lines(folder / "questions.jsonl", [{"prompt": WORDS}] * 4)
    _write_traces(folder)
    (folder / "home" / "calibrations").mkdir(parents=True, exist_ok=True)
    loopback = {"link_schema": 1, "name": "loopback", "latency_s": 4e-5, "latency_p99_s": 1e-4}
    loopback |= {"bandwidth": 1e9, "measured_at": "2026-11-28T16:00:00+00:00"}
    (folder / "home" / "calibrations" / "link-loopback.json").write_text(json.dumps(loopback))


def _write_traces(folder: Path) -> None:
    requests = [
        {"timestamp": 500 * i, "input_length": 60, "output_length": 5, "hash_ids": [i]}
        for i in range(24)
    ]
    for name in ("conversation_trace.jsonl", "day.jsonl", "trace.jsonl"):
        write_lines(folder / name, requests)
    turns = [
        {"chat_id": i, "parent_chat_id": -1, "timestamp": float(i), "input_length": 35}
        | {"output_length": 9, "type": "text", "turn": 1, "hash_ids": [3 * i, 3 * i + 1, 3 * i + 2]}
        for i in range(4)
    ]
    write_lines(folder / "qwen_trace.jsonl", turns)
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    (folder / "BurstGPT_1.csv").write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n"
    )
    talk = [{"from": "human", "value": WORDS}, {"from": "gpt", "value": WORDS}]
    talks = [{"id": str(i), "conversations": talk} for i in range(8)]
    for name in ("ShareGPT_V3.json", "ShareGPT_V3_unfiltered_cleaned_split.json"):
        (folder / name).write_text(json.dumps(talks))


def write_lines(path: Path, documents: list[dict]) -> None:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def with_stand_ins(command: Command, model: Path, server: str) -> Command:
    """The command about the tiny model, which is also the default, and a server that is there."""
    if command[:2] == ["generate", "-"]:
        command = ["generate", str(model), *command[1:]]
    args = vars(cli.build_parser(command).parse_args(command))
    usual = DEFAULT_MODEL if command[0] == "serve" else "has none"
    said = usual if command[0] == "spec" else args.get("model", usual)  # --model is an option there
    if said in (DEFAULT_MODEL, None) and not {DEFAULT_MODEL, "--config", "--base-url"} & {*command}:
        number = 2 if command[0] == "bench" else 1
        command = [*command[:number], DEFAULT_MODEL, *command[number:]]
    alias = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, ALIASES))})(?![\w./-])")
    found = []
    for word in command:
        is_file = word.startswith(("./", "/", "http"))
        found.append(word if is_file else alias.sub(lambda _: str(model), word))
    if "--base-url" in found and "--tokenizer" not in found and command[:2] == ["bench", "serve"]:
        found += ["--tokenizer", str(model)]  # which a server's own model, installed here, says
    return [re.sub(r"^http://127.0.0.1:8000$", server, word) for word in found]


ENGINE = "--max-model-len 2048 --num-blocks 512 --max-num-seqs 8 --threads 1"
SMALLER = {
    "generate": f"--max-tokens 8 {ENGINE}",
    "chat": f"--max-tokens 8 {ENGINE}",
    "perplexity": "--ctx 128 --max-tokens 512 --num-blocks 256 --max-num-seqs 4 --threads 1",
    "bench latency": f"--input-len 32 --output-len 4 --repeat 1 --warmup 0 {ENGINE}",
    "bench throughput": f"--num-prompts 4 --output-len 4 --repeat 1 --warmup 0 {ENGINE}",
    "bench sweep": "--concurrency 1,2 --input-len 16 --output-len 4 --repeat 1 --waves 1",
    "bench spec": f"--batch-sizes 1 --max-tokens 8 --repeat 1 {ENGINE}",
    "bench prefix": f"--prefix-len 64 --questions 2 --output-len 8 --repeat 1 {ENGINE}",
    "bench startup": f"--num-iters-cold 1 --num-iters-warm 1 {ENGINE}",
    "bench ablation": f"--quick --only prefix-cache {ENGINE}",
    "bench serve": "--num-prompts 4 --random-input-len 16 --random-output-len 4 --request-rate 50",
    "build": "--max-model-len 2048 --num-blocks 512 --max-num-seqs 8",
    "calibrate": f"--quick {ENGINE}",
    "validate": f"--repeats 1 --num-prompts 4 {ENGINE}",
    "tune": "--num-prompts 20 --candidates 2",
    "train-draft": "--steps 2 --tokens 300 --minutes 1",
    "quantize": "--calibration-tokens 1024 --report-text wiki.test.raw",
    "simulate": "--num-prompts 40",
}


def smaller(command: Command) -> Command:
    """The command with the settings that make it long said once more."""
    name = " ".join(command[:2]) if command[0] == "bench" else command[0]
    more = SMALLER.get(name, "")
    if name == "tune" and "--hardware" not in command:  # the best ones run here
        more += f" --live 1 --live-seconds 1 --turns 1 {ENGINE}"
    return [*command, *shlex.split(more)]
