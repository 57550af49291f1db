"""Prompts and traces in: turns what the user declares into requests with arrival times."""
