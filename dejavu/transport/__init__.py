"""Moves messages between processes: one contract (base), several transports. Knows nothing of KV, plans or etcd."""
