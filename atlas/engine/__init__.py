"""The engine: requests in, tokens out. One process, one step loop."""
