"""The verbs of the core, and what they share: models, questions, the loop, baselines."""
