"""The embedded engine: any causal language model that Transformers loads, in this process."""
