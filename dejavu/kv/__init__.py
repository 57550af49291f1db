"""DejaVuLib: KV cells, where they live and how they move. Owns buffers and chunks; knows no model and no schedule."""
