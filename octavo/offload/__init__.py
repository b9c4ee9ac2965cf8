"""KV blocks that outlive the pool: a folder of them, their identity, and when to read them."""
