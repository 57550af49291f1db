"""What a run leaves for people: completions, metrics, timeline, logs, tables, progress.

Owns the files of a run's output folder and what is shown on the terminal. Decides nothing: it must not know a
schedule, a plan's reasons or a model, and nothing here blocks or slows a worker.
"""
