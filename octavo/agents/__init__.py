"""Tools that run, of a Python file or an MCP server, and the loop in which a model calls them."""
