"""DejaVu serves large language models over a pipeline of machines, declared in YAML (arXiv 2403.01876)."""

__version__ = "0.1.0"
