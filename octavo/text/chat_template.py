"""Chat templates: from a conversation to the text that the model was trained on.

A chat template is a Jinja program that comes with the model, so it is not trusted: see
``chat_sandbox`` for what it can reach (nothing) and ``chat_budget`` for how much it can do (about a
second of CPU time, 4 MiB of output). Whatever goes wrong in it is a ``ChatTemplateError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError

from octavo.base.errors import ChatTemplateError
from octavo.text.chat_budget import MAX_OUTPUT_BYTES, Budget, ChatContext
from octavo.text.chat_sandbox import ChatEnvironment

# Of a template's source. Compiling that much takes about a second; the largest templates that
# models come with have some 20,000 characters and 5,000 syntax nodes.
MAX_SOURCE = 96 << 10
MAX_NODES = 16_000
_MAX_MESSAGE = 500

_ENVIRONMENT = ChatEnvironment()


class ChatTemplate:
    """A compiled template. Rendering changes nothing in it, so any threads may share it.

    ``literals``: the constant strings in its expressions, which are what it can look for in data.
    ``reads_parts``: whether it goes through a message's content as a list of parts.
    ``knows_none``: whether it asks of a message's content whether it is none.
    """

    def __init__(self, source: str):
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(
                f"the chat template has {len(source):,} characters; {MAX_SOURCE:,} are allowed"
            )
        self.source = source
        try:
            tree = _ENVIRONMENT.parse(source)
            num_nodes = sum(1 for _ in tree.find_all(nodes.Node))
            if num_nodes > MAX_NODES:
                raise ChatTemplateError(
                    f"the chat template has {num_nodes:,} syntax nodes; {MAX_NODES:,} are allowed"
                )
            self.literals = frozenset(
                node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
            )
            self.reads_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
            self.knows_none = any(
                test.name == "none" and _is_content(test.node) for test in tree.find_all(nodes.Test)
            )
            self._template = _ENVIRONMENT.from_string(tree)
        except ChatTemplateError:
            raise
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"line {error.lineno}: {error.message}") from error
        except Exception as error:  # the parser's and Python's own limits
            raise ChatTemplateError(f"cannot compile the chat template: {_say(error)}") from error

    def render(self, variables: Mapping[str, Any], budget: Budget | None = None) -> str:
        """The text for ``variables``, which must be plain data (see ``chat_messages.plain``)."""
        context = self._template.new_context(dict(variables))
        assert isinstance(context, ChatContext)
        context.budget = budget or Budget()
        chunks: list[str] = []
        total = 0
        try:
            for chunk in self._template.root_render_func(context):
                context.budget.work()
                total += len(chunk) if chunk.isascii() else len(chunk.encode(errors="replace"))
                if total > MAX_OUTPUT_BYTES:
                    raise ChatTemplateError(f"the output exceeds {MAX_OUTPUT_BYTES >> 20} MiB")
                chunks.append(chunk)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{self._where(error)}{error}") from error
        except Exception as error:
            raise ChatTemplateError(
                f"the chat template cannot write these messages: {self._where(error)}{_say(error)}"
            ) from error
        return "".join(chunks)

    def _where(self, error: BaseException) -> str:
        """``line N: `` of the template, from the traceback through its compiled code."""
        line = None
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == "<template>":
                line = self._template.get_corresponding_lineno(traceback.tb_lineno)
            traceback = traceback.tb_next
        return "" if line is None else f"line {line}: "


@lru_cache(maxsize=32)
def compile_chat_template(source: str) -> ChatTemplate:
    """The compiled template of a source, remembered."""
    return ChatTemplate(source)


def _is_content(node: nodes.Node | None) -> bool:
    """Whether an expression is ``content``, ``message.content`` or ``message['content']``."""
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False


def _say(error: Exception) -> str:
    if isinstance(error, ChatTemplateError):
        return str(error)
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"{str(error)[:_MAX_MESSAGE] or type(error).__name__}"
