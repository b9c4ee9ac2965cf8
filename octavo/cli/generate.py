"""``octavo generate``: one or more prompts, answers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octavo.cli import UsageError, results, terminal
from octavo.cli.engine_flags import (
    add_engine_flags,
    add_model_argument,
    answering_adapter,
    engine_kwargs,
)
from octavo.cli.flags import add_json_flag, add_switch, add_value, read_text
from octavo.cli.sampling_flags import add_sampling_flags, base_params, sampling_fields
from octavo.core.sampling_params import SamplingParams
from octavo.hub import DEFAULT_MODEL
from octavo.system.machine import without_blas_threads

if TYPE_CHECKING:
    from octavo import LLM, RequestOutput

DEFAULTS: dict[str, Any] = {"max_tokens": 256}

EXAMPLES = """\
examples:
  octavo generate --prompt "Why is the sky blue?"
  octavo generate gemma3-270m --raw --prompt "The sea is" --max-tokens 32 --temperature 0
  octavo generate ./model.gguf --prompt-file question.txt --seed 1 --n 3
  octavo generate --lora sql=adapters/sql --prompt "All customers of March:"
  git diff | octavo generate - --system "Summarise this change in one sentence."
  octavo generate --prompt "One" --prompt "Two" --json | jq '.outputs[].outputs[].text'
"""


# Settings of an engine that are in the short help of commands for one person.
OFTEN = ("device", "max_model_len", "spec_method", "threads")


def configure(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("stdin", nargs="?", choices=["-"], metavar="-", help="prompt from stdin")
    parser.add_argument(
        *("--prompt", "-p"),
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt (may be repeated)",
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file whose whole text is a prompt; - is stdin (may be repeated)",
    )
    form = parser.add_mutually_exclusive_group()
    add_switch(
        form, "--chat", "wrap prompts in the model's chat template (the default where it has one)"
    )
    add_switch(form, "--raw", "give the model the prompt as it is")
    add_value(parser, "--system TEXT", "system message, with a chat template")
    add_json_flag(parser)
    add_sampling_flags(parser, **DEFAULTS)
    add_engine_flags(parser, skip={"seed"}, often=OFTEN)


def run(args: argparse.Namespace) -> int:
    if args.model == "-":  # `octavo generate -`
        args.model, args.stdin = DEFAULT_MODEL, "-"
    prompts = read_prompts(args)
    sampling = sampling_fields(args)
    if args.raw and args.system is not None:
        raise UsageError("--system needs a chat template, and --raw goes without one")
    engine = engine_kwargs(args)
    lora = answering_adapter(engine)
    with load(args.model, engine) as llm:
        params = base_params(llm, **DEFAULTS | sampling)
        use_chat = not args.raw and (args.chat or args.system is not None or llm.has_chat_template)
        inputs = [_messages(text, args.system) for text in prompts] if use_chat else prompts
        if args.json:
            outputs = _answer_all(llm, inputs, params, lora, use_chat)
            return _print_json(args.model, llm, prompts, params, outputs)
        if len(inputs) == 1 and params.num_samples == 1:
            return _stream_one(llm, inputs[0], params, lora, use_chat)
        return _print_all(prompts, _answer_all(llm, inputs, params, lora, use_chat))


def read_prompts(args: argparse.Namespace) -> list[str]:
    """All prompts: ``--prompt``, then files, then stdin."""
    files = [*args.prompt_file, *([args.stdin] if args.stdin else [])]
    if files.count("-") > 1:
        raise UsageError("stdin can be read only once")
    prompts = [*args.prompt, *(read_text(path, "--prompt-file") for path in files)]
    if not prompts:
        raise UsageError("no prompt: give --prompt TEXT, --prompt-file FILE, or - for stdin")
    return prompts


def load(model: str, kwargs: dict[str, Any]) -> LLM:
    """Fetch the model if need be, then make the engine, with progress on a terminal."""
    terminal.resolve(model)
    with terminal.spinner("starting"), without_blas_threads():
        import numpy  # noqa: F401

        from octavo import LLM
    if not terminal.can_animate():
        return LLM(model=model, **kwargs)
    with terminal.progress_bar("loading", model) as progress:
        return LLM(model=model, progress=progress, **kwargs)


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": prompt}]


def _answer_all(
    llm: LLM,
    inputs: list[Any],
    params: SamplingParams,
    lora: dict[str, Any],
    use_chat: bool,
) -> list[RequestOutput]:
    answer = llm.chat if use_chat else llm.generate
    outputs: list[RequestOutput] = answer(inputs, params, use_tqdm=terminal.can_animate(), **lora)
    return outputs


def _stream_one(
    llm: LLM, prompt: Any, params: SamplingParams, lora: dict[str, Any], use_chat: bool
) -> int:
    """Text to stdout as it comes, figures to stderr when it ends."""
    stream = llm.stream_chat if use_chat else llm.stream
    output = None
    writer = terminal.AnswerWriter()
    for chunk in stream(prompt, params, **lora):
        writer.write(chunk.text)
        output = chunk.output
    writer.end()
    if output is not None:
        terminal.say(results.summary(output))
    return _status([output] if output is not None else [])


def _print_all(prompts: list[str], outputs: list[RequestOutput]) -> int:
    """Every answer under a line that says which it is."""
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            which = f", answer {completion.index + 1}" if len(output.outputs) > 1 else ""
            head = f"==> {' '.join(prompt.split())[:60]}{which}"
            terminal.write_answer(f"{head}\n{completion.text}\n\n")
        terminal.say(results.summary(output))
    return _status(outputs)


def _print_json(
    model: str,
    llm: LLM,
    prompts: list[str],
    params: SamplingParams,
    outputs: list[RequestOutput],
) -> int:
    speculation = llm.config.speculation
    method = None if speculation is None else speculation.method
    document = {
        "model": model,
        "outputs": [
            results.request_json(prompt, output, params, method)
            for prompt, output in zip(prompts, outputs, strict=True)
        ],
        "engine": llm.engine_info(),
    }
    terminal.print_json(document)
    return _status(outputs)


def _status(outputs: list[RequestOutput]) -> int:
    """1 where an answer failed, although the others are fine."""
    failed = [output for output in outputs if output.error is not None]
    for output in failed:
        terminal.say(f"octavo: error: {output.error}")
    return 1 if failed else 0
