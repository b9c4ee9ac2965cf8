"""KV blocks that outlive the pool: a folder of them, what they depend on, when to read them."""
