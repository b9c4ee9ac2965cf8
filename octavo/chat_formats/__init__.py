"""Formats in which models write thoughts and tool calls: parsers, grammars, and their choice."""
