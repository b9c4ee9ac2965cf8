"""Whatever a tokenizer, a chat template or a detokenizer does, it does beside the event loop.

By reading the source. A call is found by its name, ``tokenizer.encode`` and the like, and so is
every function that makes one, or calls a function that does. Coroutines, which run on the event
loop, may only hand such functions on, to what runs them in the background. What looks one token up
in a table is none of these.
"""

from __future__ import annotations

import ast
from pathlib import Path

import octavo.server

ROOT = Path(octavo.server.__file__).parent
# Of a tokenizer: they read texts, or as many tokens as they are given.
CALLS = {"encode", "encode_words", "decode", "chat_prompt", "chat_template_source"}
TEMPLATES = {"of", "thought_budget"}  # of `ChatTemplates`, which are compiled and rendered
DETOKENIZERS = {"IncrementalDetokenizer"}
BACKGROUND = {"in_background", "briefly_in_background", "post_in_background", "_run"}


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_tokenizers(node: ast.Call) -> bool:
    """Whether a call is one of a tokenizer, or makes a detokenizer."""
    function = node.func
    if name_of(function) in DETOKENIZERS:
        return True
    if not isinstance(function, ast.Attribute):
        return False
    asked = {"tokenizer": CALLS, "chat_templates": TEMPLATES}
    return function.attr in asked.get(name_of(function.value).strip("_"), ())


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> list[tuple[str, Function]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, Function):
                found.append((str(path.relative_to(ROOT)), node))
    return found


def calls_of(function: Function) -> list[ast.Call]:
    """Those that a function makes itself: not those of functions that it defines, nor those of
    lambdas that it hands to the background."""
    found: list[ast.Call] = []
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            found.append(node)
            if name_of(node.func) in BACKGROUND:
                continue  # what it is given is called there
        waiting += ast.iter_child_nodes(node)
    return found


def blocking(all_functions: list[tuple[str, Function]]) -> set[str]:
    """Names of functions that are no coroutines and, by whatever way, ask a tokenizer."""
    names: set[str] = set()
    while True:
        before = len(names)
        for _, function in all_functions:
            if isinstance(function, ast.FunctionDef) and any(
                is_tokenizers(call) or name_of(call.func) in names for call in calls_of(function)
            ):
                names.add(function.name)
        if len(names) == before:
            return names


def test_no_coroutine_asks_a_tokenizer_itself():
    every = functions()
    names = blocking(every)
    assert {"_render", "_encode_all"} <= names, "or nothing is found at all"
    found = [
        f"{path}:{call.lineno} {function.name} calls {name_of(call.func)}"
        for path, function in every
        if isinstance(function, ast.AsyncFunctionDef)
        for call in calls_of(function)
        if is_tokenizers(call) or name_of(call.func) in names
    ]
    assert not found, found


def test_what_is_looked_for_is_found():
    source = """
async def route(service, text):
    return helper(service, text)

def helper(service, text):
    return service.prompts.tokenizer.encode(text)

async def fine(service, text):
    return await in_background(helper, service, text)
"""
    every = [("x", node) for node in ast.parse(source).body]
    names = blocking(every)
    assert names == {"helper"}
    route, _, fine = (function for _, function in every)
    assert [name_of(call.func) for call in calls_of(route)] == ["helper"]
    assert [name_of(call.func) for call in calls_of(fine)] == ["in_background"]
