"""Reconcile loops that keep the running cluster equal to the declared one: membership, placement, launch, status."""
