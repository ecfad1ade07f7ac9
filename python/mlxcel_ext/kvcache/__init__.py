"""The paged KV cache: page accounting and prefix tree (pure), and the pool of arrays."""
