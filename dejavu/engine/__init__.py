"""Inside a worker: receive, compute, stream, acknowledge. The only place that joins model, KV and transport."""
