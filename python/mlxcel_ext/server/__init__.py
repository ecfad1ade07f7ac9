"""OpenAI-compatible HTTP server over the engine's public methods."""
