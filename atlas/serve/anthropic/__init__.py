"""Anthropic's API: the Messages endpoints."""
