"""Grammars of answers that are free up to a text, such as the end of a thought, and constrained
after it."""

from __future__ import annotations

from octavo.base.errors import ConstraintError
from octavo.grammars.lark import LarkGrammar


def after(grammar: LarkGrammar, tag: str, answer: str, stop_token_ids: tuple[int, ...]) -> str:
    """Return the expression of anything up to the first ``tag``, followed by ``answer``; or of
    anything without it.

    Special tokens may come in what is free, other than those that end the text.

    Args:
        tag: a text, or special tokens with texts between them.
    """
    parts = grammar.parts(tag)
    if len(parts) == 1 and isinstance(parts[0], str):
        free, head = grammar.free_text(tag), grammar.text_up_to(tag)
        if (specials := grammar.specials(without=stop_token_ids)) is None:
            return f"{head} {answer} | {free}"
        return f"({free} {specials})* ({head} {answer} | {free})"
    if isinstance(parts[0], str) or isinstance(parts[-1], str):
        raise ConstraintError(
            f"has text before its first or after its last special token: {tag!r:.80}",
            "structured_outputs.begins_after",
            "unsupported",
        )
    return _automaton(grammar, parts, answer, stop_token_ids)


def _automaton(
    grammar: LarkGrammar, tag: list[str | int], answer: str, stop_token_ids: tuple[int, ...]
) -> str:
    """Return a rule for each number of parts of the tag that have come, as Knuth, Morris and Pratt
    find a text. A text is a part if it is all that stands between two special tokens."""
    texts = list(dict.fromkeys(part for part in tag if isinstance(part, str)))
    named = list(dict.fromkeys(part for part in tag if isinstance(part, int)))
    others = grammar.specials(without=(*stop_token_ids, *named))
    any_text = grammar.terminal(r"/(?s:.+)/")
    banned = "".join(f" & ~{grammar.pattern_of(text)}" for text in texts)
    other_text = grammar.terminal(rf"/(?s:.+)/{banned}") if texts else any_text

    def next_state(state: int, part: str | int) -> int:
        seen = [*tag[:state], part]
        return next(k for k in range(len(seen), -1, -1) if seen[len(seen) - k :] == tag[:k])

    def name(state: int, *, is_after_text: bool) -> str:
        return f"{'text' if is_after_text else 'mark'}_{state}"

    for state in range(len(tag)):
        marks = [f"{others} {name(0, is_after_text=False)}"] if others else []
        for token_id in named:
            if (reached := next_state(state, token_id)) == len(tag):
                marks.append(f"<[{token_id}]> {answer}")
            else:
                marks.append(f"<[{token_id}]> {name(reached, is_after_text=False)}")
        runs = [f"{other_text} {name(0, is_after_text=True)}"]
        for text in texts:
            reached = next_state(state, text)
            runs.append(f"{grammar.text(text)} {name(reached, is_after_text=True)}")
        grammar.add_rule(name(state, is_after_text=True), " | ".join(['""', *marks]))
        grammar.add_rule(name(state, is_after_text=False), " | ".join(['""', *marks, *runs]))
    return name(0, is_after_text=False)
