"""KV blocks on a disk, which outlive the pool and the process."""
