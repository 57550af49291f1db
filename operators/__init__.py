"""Reconcile loops that keep the running cluster equal to the declared one: placement, launch, recovery, status."""
