"""Load generator for OpenAI-compatible servers, with vLLM's flags, metric names and JSON keys."""
