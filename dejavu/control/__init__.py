"""Pure decisions: plan, placement, schedule, row state. No I/O, no clock of its own, no threads."""
