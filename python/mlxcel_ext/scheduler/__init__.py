"""Which request computes what in the next step. Pure: no arrays, no MLX."""
