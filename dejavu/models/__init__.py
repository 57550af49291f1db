"""A causal LM out of transformers, one stage of it at a time: families, weights, sampling, tokenizers. Knows no pipeline."""
