"""The HTTP side of Atlas: OpenAI endpoints in front of the engine process."""
