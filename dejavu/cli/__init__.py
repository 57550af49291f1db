"""The command line: flags, overrides and what is wrong with them, told in at most three lines.

The only place that touches Hydra's internals. Starts nothing and knows no workflow.
"""
