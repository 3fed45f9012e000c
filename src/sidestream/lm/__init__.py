"""A causal language model that carries channels. The only package that imports transformers."""
