"""A causal LM out of transformers, one stage at a time: families, weights, sampling, tokenizers. Knows no pipeline."""
