"""What a run leaves for people: completions, metrics, timeline, tables. Decides nothing."""
