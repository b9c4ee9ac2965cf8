"""Coding agents that are pointed at the server: the requests that they send, in their order.

What they send was read in their sources and their logs; the engine writes what a test says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from writing_engine import QWEN3, Observer, Writer, named_events, send

from octavo.server.app import create_server_app
from octavo.server.http.tenants import Tenants
from octavo.server.watch.metrics import Metrics

CALL = '<tool_call>\n{"name": "NAME", "arguments": {"command": "ls -la"}}\n</tool_call>'


@pytest.fixture
def agent(create_service, byte_tokenizer) -> Callable[..., Any]:
    """Makes a whole server of an engine that writes a text, which can be given another."""

    class Agent:
        def __init__(self, text: str, **headers: str):
            self.engine = Writer(text, size=16)
            # As much as an agent's prompts have.
            self.engine.facts = self.engine.facts.__class__(65_536, 64, 260, 65_536, 16, (256,))
            service = create_service(self.engine, api_key=("secret",), served_model_name=("*",))
            object.__setattr__(service, "metrics", Metrics("tiny"))
            object.__setattr__(service, "observer", Observer())
            service.prompts._chat_template = QWEN3
            self.app = create_server_app(service, Tenants(service.settings))
            self.headers = {"host": "localhost", **headers}

        def ask(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
            response = send(self.app, method, path, json=body, headers=self.headers)
            assert response.status_code == status, response.text
            return response

        def prompt(self) -> str:
            return byte_tokenizer.decode(self.engine.requests[-1].prompt_token_ids)

    return Agent


def ignored(response: Any) -> list[str]:
    return response.headers["x-octavo-ignored"].split(", ")


# -- Claude Code -------------------------------------------------------------------------------

MARK = {"type": "ephemeral"}


def claude_tool(name: str) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command to execute"},
            "timeout": {"type": "number", "description": "Optional timeout in milliseconds"},
            "run_in_background": {"type": "boolean"},
        },
        "required": ["command"],
        "additionalProperties": False,
    }
    return {"name": name, "description": f"{name}. " * 50, "input_schema": schema}


NAMES = ("Task", "Bash", "Glob", "Grep", "Read", "Edit", "Write", "NotebookEdit", "WebFetch")


def test_claude_code(agent) -> None:
    client = agent(
        f"I will look. {CALL.replace('NAME', 'Bash')}",
        **{
            "authorization": "Bearer secret",
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
            "context-management-2025-06-27,prompt-caching-scope-2026-01-05",
            "anthropic-dangerous-direct-browser-access": "true",
            "x-app": "cli",
            "x-stainless-lang": "js",
            "user-agent": "claude-cli/2.1.0 (external, cli)",
        },
    )
    assert client.ask("HEAD", "/").content == b""
    tools = [claude_tool(name) for name in NAMES]
    messages = [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
            {"type": "text", "text": "List the files.", "cache_control": MARK}]},
    ]  # fmt: skip
    count = {"model": "claude-opus-4-8", "messages": messages, "tools": tools}
    counted = client.ask("POST", "/v1/messages/count_tokens?beta=true", count).json()
    assert counted["input_tokens"] > 1000
    body = {
        "model": "claude-opus-4-8",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": MARK},
            {"type": "text", "text": "Be concise. " * 200, "cache_control": MARK},
        ],
        "messages": messages,
        "tools": tools,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_0_account__session_1"},
    }
    response = client.ask("POST", "/v1/messages?beta=true", body)
    # What has no effect is said, and nothing else is.
    assert set(ignored(response)) == {"metadata", "context_management"}
    events = named_events(response)
    usage = events[0]["message"]["usage"]
    assert usage["cache_creation_input_tokens"] > 1000 and usage["input_tokens"] < 16
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    arguments = json.loads("".join(delta.get("partial_json", "") for delta in deltas))
    (call,) = [
        event["content_block"]
        for event in events
        if event.get("content_block", {}).get("type") == "tool_use"
    ]
    assert (text.strip(), call["name"], arguments) == (
        "I will look.",
        "Bash",
        {"command": "ls -la"},
    )
    assert events[-2]["delta"]["stop_reason"] == "tool_use"

    client.engine.texts = ("There is one.",)
    messages += [
        {"role": "assistant", "content": [
            {"type": "text", "text": text}, {**call, "input": arguments}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "is_error": False,
             "content": [{"type": "text", "text": "a.py"}], "cache_control": MARK}]},
    ]  # fmt: skip
    events = named_events(client.ask("POST", "/v1/messages?beta=true", body))
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert '"ls -la"' in client.prompt() and "a.py" in client.prompt()
    # A side request of a smaller model, with a title as JSON.
    client.engine.texts = ('{"title": "Files"}',)
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"],
              "additionalProperties": False}  # fmt: skip
    title = {
        "model": "claude-haiku-4-5-20251001",
        "max_tokens": 32_000,
        "messages": [{"role": "user", "content": "List the files."}],
        "system": [{"type": "text", "text": "Write a title."}],
        "tools": [],
        "temperature": 1,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    answer = client.ask("POST", "/v1/messages?beta=true", title).json()
    assert json.loads(answer["content"][0]["text"]) == {"title": "Files"}


# -- Codex -------------------------------------------------------------------------------------

SHELL = {
    "type": "function",
    "name": "shell_command",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "string"},
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
PLAN = {
    "type": "function",
    "name": "update_plan",
    "description": "Updates the task plan.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"plan": {"type": "array", "items": {"type": "object"}}},
        "required": ["plan"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin hunk+ end"},
}


def test_codex(agent) -> None:
    client = agent(
        f"<think>Look first.</think>{CALL.replace('NAME', 'shell_command')}",
        authorization="Bearer secret",
        originator="codex_cli_rs",
        session_id="0199-1",
    )
    items = [
        {"type": "message", "role": "developer", "content": [
            {"type": "input_text", "text": "<permissions instructions>read-only</permissions>"}]},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "<environment_context><cwd>/x</cwd>"}]},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "List the files."}]},
    ]  # fmt: skip
    body = {
        "model": "gpt-5.2-codex",
        "instructions": "You are Codex. " * 200,
        "input": items,
        "tools": [SHELL, PLAN, PATCH, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-1",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    response = client.ask("POST", "/v1/responses", body)
    assert set(ignored(response)) == {
        "tools.web_search", "prompt_cache_key", "verbosity", "summary", "client_metadata",
    }  # fmt: skip
    events = named_events(response)
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    thought, call = done
    assert thought["type"] == "reasoning" and thought["encrypted_content"]
    assert json.loads(call["arguments"]) == {"command": "ls -la"}
    assert events[-1]["response"]["usage"]["total_tokens"] > 3000
    assert "You are Codex." in client.prompt() and "apply_patch" in client.prompt()

    # Thoughts go back as they are sealed, without their content.
    client.engine.texts = (CALL.replace("NAME", "apply_patch").replace("command", "input"),)
    items += [
        {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]},
        {"type": "function_call", "name": call["name"], "arguments": call["arguments"],
         "call_id": call["call_id"]},
        {"type": "function_call_output", "call_id": call["call_id"],
         "output": "Exit code: 0\nOutput:\na.py"},
    ]  # fmt: skip
    last = named_events(client.ask("POST", "/v1/responses", body))[-1]["response"]
    assert "a.py" in client.prompt() and '"ls -la"' in client.prompt()
    (patch,) = last["output"]
    assert (patch["type"], patch["input"]) == ("custom_tool_call", "ls -la")


# -- aider -------------------------------------------------------------------------------------


def test_aider(agent) -> None:
    """It asks by LiteLLM, without tools: edits are blocks in the text."""
    client = agent("Sure:\n\na.py\n```\n<<<<<<< SEARCH", authorization="Bearer secret")
    messages = [
        {"role": "system", "content": "Act as an expert software developer. " * 100},
        {"role": "user", "content": "Change the greeting to be more casual"},
        {"role": "assistant", "content": "Ok, I will.\n"},
        {"role": "user", "content": "I switched to a new code base."},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": [
            {"type": "text", "text": "Add a test.", "cache_control": {"type": "ephemeral"}}]},
    ]  # fmt: skip
    body = {
        "model": "tiny",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    response = client.ask("POST", "/v1/chat/completions", body)
    chunks = [
        json.loads(event.removeprefix("data: "))
        for event in response.text.split("\n\n")
        if event.startswith("data: {")
    ]
    pieces = [c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]]
    assert "".join(pieces) == "Sure:\n\na.py\n```\n<<<<<<< SEARCH"
    assert chunks[-1]["usage"]["completion_tokens"] == len("".join(pieces))
