"""The simulator: a discrete-event engine, and the cluster's own control code under a virtual clock.

Pure: no process, no file, no wall clock. It decides nothing that the cluster decides: rows, microbatches, steps,
placement and recovery come from ``dejavu.control``. Only durations are its own (``costs.py``).
"""
