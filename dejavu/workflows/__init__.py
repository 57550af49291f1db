"""One file a workflow; the only importers of operators."""
