"""Measuring: speed of the in-process engine or of any OpenAI-compatible server, accuracy of quantised formats."""
