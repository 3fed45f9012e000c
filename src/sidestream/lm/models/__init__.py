"""A causal LM as it comes, and what an attached one shows to others."""
