"""The Jinja environment of chat templates: Jinja's immutable sandbox, locked further.

Jinja's sandbox keeps a template away from Python's insides, but not from filling the memory or
running for ever. Here, before a template is compiled,

- node types that no chat template needs are refused (include, import, blocks, autoescape);
- every turn of a loop and every call of a macro is made to pay, and so is every operation that
  makes or walks through data and that Jinja would compile to plain Python: ``~``, slices,
  comparisons, literals;

and while it runs, attributes exist only if they are listed here or in ``chat_operators``.
The budget of a rendering is ``context.budget``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from octavo.base.errors import ChatTemplateError
from octavo.text.chat_budget import Budget, ChatContext, is_scalar
from octavo.text.chat_builtins import GLOBALS, TESTS, TemplateNamespace
from octavo.text.chat_filters import FILTERS
from octavo.text.chat_operators import METHODS, binary

_NODE_NAMES = """
    Add And Assign AssignBlock Break Call CallBlock Compare Concat CondExpr Const Continue Dict Div
    Filter FilterBlock FloorDiv For Getattr Getitem If Keyword List Macro Mod Mul NSRef Name Neg Not
    Operand Or Output Pair Pos Pow Scope Slice Sub Template TemplateData Test Tuple With
"""
_ALLOWED_NODES = frozenset(_NODE_NAMES.split())
_LOOP_NAMES = "depth depth0 first index index0 last length nextitem previtem revindex revindex0"
_LOOP_ATTRIBUTES = frozenset(_LOOP_NAMES.split())
_LOOP_METHODS = frozenset({"changed", "cycle"})
_INDEXABLE = (dict, list, str, tuple, range)


class BoundMethod:
    """A method of a plain value, on its way to being called."""

    __slots__ = ("_method", "_owner")

    def __init__(self, owner: Any, method: Callable[..., Any]):
        self._owner = owner
        self._method = method

    def __call__(self, environment: Any, budget: Budget, *args: Any, **kwargs: Any) -> Any:
        return self._method(environment, budget, self._owner, *args, **kwargs)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates with the settings of transformers, and runs them within bounds."""

    context_class = ChatContext
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            finalize=_finalize,
            cache_size=0,
            extensions=[GenerationTag, loopcontrols],
        )
        self.filters = dict(FILTERS)
        self.tests = dict(TESTS)
        self.globals = dict(GLOBALS)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(nodes.Node):
            kind = type(node).__name__
            if kind not in _ALLOWED_NODES:
                raise ChatTemplateError(f"line {node.lineno}: {kind} is not allowed")
        _Instrument().visit(tree)
        return tree

    def call_filter(self, name: Any, *args: Any, **kwargs: Any) -> Any:
        _check_name(name)
        return super().call_filter(name, *args, **kwargs)

    def call_test(self, name: Any, *args: Any, **kwargs: Any) -> Any:
        _check_name(name)
        return super().call_test(name, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        assert isinstance(context, ChatContext)
        return binary(context.budget, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute``: a listed method or attribute, else the item of that name."""
        if isinstance(obj, Undefined):
            return super().getattr(obj, attribute)
        method = METHODS.get(type(obj), {}).get(attribute)
        if method is not None:
            return BoundMethod(obj, method)
        if isinstance(obj, LoopContext):
            return self._loop_attribute(obj, attribute)
        if isinstance(obj, TemplateNamespace):
            return self._namespace_attribute(obj, attribute)
        if isinstance(obj, tuple) and attribute in ("grouper", "list"):
            return getattr(obj, attribute, self.undefined(obj=obj, name=attribute))  # groupby
        if not hasattr(obj, attribute) and isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        if hasattr(obj, attribute):
            return self.unsafe_undefined(obj, attribute)
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``: the item, else the attribute of that name."""
        if isinstance(obj, Undefined):
            return obj[argument]
        if isinstance(obj, _INDEXABLE) and is_scalar(argument):
            try:
                return obj[argument]
            except (TypeError, LookupError):
                pass
        if isinstance(argument, str):
            return self.getattr(obj, argument)
        return self.undefined(obj=obj, name=argument if is_scalar(argument) else "?")

    def _loop_attribute(self, loop: LoopContext, attribute: str) -> Any:
        if attribute in _LOOP_ATTRIBUTES:
            return getattr(loop, attribute)
        if attribute in _LOOP_METHODS:
            return BoundMethod(loop, _loop_method(attribute))
        return self.undefined(obj=loop, name=attribute)

    def _namespace_attribute(self, namespace: TemplateNamespace, attribute: str) -> Any:
        if attribute.startswith("_"):
            return self.unsafe_undefined(namespace, attribute)
        try:
            return getattr(namespace, attribute)
        except AttributeError:
            return self.undefined(obj=namespace, name=attribute)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(context, ChatContext)
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        budget = context.budget
        budget.work(4)
        if len(args) + len(kwargs) > 8:
            budget.allocate_items(len(args) + len(kwargs))
        if isinstance(function, BoundMethod):
            return function(self, budget, *args, **kwargs)
        if isinstance(function, (Macro, LoopContext)):
            return _call_nested(context, function, args, kwargs)
        if isinstance(function, Undefined):
            return function()  # raises, naming what is undefined
        if any(function is known for known in GLOBALS.values()):
            return function(budget, *args, **kwargs)
        raise SecurityError(f"a {type(function).__name__} cannot be called")


def _check_name(name: Any) -> None:
    """Filters and tests can be named by data, as in ``map(name)``."""
    if not isinstance(name, str) or name.startswith("~"):
        raise SecurityError("no such filter or test")


def _call_nested(
    context: ChatContext,
    function: Macro | LoopContext,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str:
    """Calls a macro, or a recursive loop, which may call itself again."""
    budget = context.budget
    budget.enter()
    try:
        if isinstance(function, Macro):
            result: str = function(context.eval_ctx, *args, **kwargs)
        else:
            result = function(*args, **kwargs)
    finally:
        budget.leave()
    budget.allocate(len(result))
    return result


def _loop_method(name: str) -> Callable[..., Any]:
    def call(environment: Any, budget: Budget, loop: LoopContext, *args: Any) -> Any:
        for argument in args:
            budget.measure(argument)
        return getattr(loop, name)(*args)

    return call


@pass_context
def _finalize(context: ChatContext, value: Any) -> Any:
    """Returns what ``{{ value }}`` writes; anything but plain data is refused."""
    if isinstance(value, str):
        context.budget.allocate(len(value))
        return value
    if isinstance(value, (int, float, Undefined)) or value is None:
        return value
    text = context.budget.text(value)
    context.budget.allocate(len(text))
    return text


class GenerationTag(Extension):
    """``{% generation %}`` marks what a model wrote, for training; it renders as its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Instrument(NodeTransformer):
    """Puts the payments into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> Any:
        if node.test is not None:
            node.test = nodes.And(_tick(node, 0), node.test, lineno=node.lineno)
        return self.visit_Macro(node)

    def visit_Macro(self, node: Any) -> Any:
        """A turn of a loop, or a call of a macro, pays before it begins."""
        self.generic_visit(node)
        characters = sum(len(data.data) for data in _find_inside(node.body, nodes.TemplateData))
        tick = _tick(node, characters)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter("~concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        none = nodes.Const(None, lineno=node.lineno)
        return _filter("~slice", node.node, *(none if bound is None else bound for bound in bounds))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        operands: list[Any] = [node, *node.ops]
        # Whether something is one number or short text is quickly said, whatever it is.
        equality = len(node.ops) == 1 and node.ops[0].op in ("eq", "ne")
        if equality and any(_is_small(operand.expr) for operand in operands):
            return node
        for operand in operands:
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = _filter("~compared", operand.expr)
        return node

    def visit_List(self, node: nodes.Expr) -> nodes.Expr:
        """A list, tuple or dict pays once it is made."""
        self.generic_visit(node)
        is_made = not isinstance(node, nodes.Tuple) or node.ctx == "load"
        return _filter("~new", node) if is_made else node

    visit_Dict = visit_Tuple = visit_List

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filter("~key", node.key)
        return node


def _is_small(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and len(str(node.value)) < 256


def _find_inside(body: list[nodes.Node], kind: type[nodes.Node]) -> list[Any]:
    """The nodes of one kind in a body, but not in the loops and macros in it."""
    found: list[Any] = []
    pending: list[nodes.Node] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, kind):
            found.append(node)
        if not isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            pending += node.iter_child_nodes()
    return found


def _filter(name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _tick(node: nodes.Node, characters: int) -> nodes.Filter:
    return _filter("~tick", nodes.Const(characters, lineno=node.lineno))
