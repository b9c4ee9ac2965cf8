"""Scripts that run inside other engines' environments, which know nothing of octavo.

Each is started by its path, with this folder first on its search path; together they need the
standard library and their engine, nothing else.
"""
