"""The controller: admits requests, gives them rows, collects tokens, answers."""
