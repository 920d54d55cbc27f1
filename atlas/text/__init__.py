"""Text around tokens, for the server and for offline use: conversations, chat templates, stop strings."""
