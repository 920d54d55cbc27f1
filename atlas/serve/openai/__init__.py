"""The endpoints of OpenAI's API: request bodies, answers, and what turns one into the other."""
