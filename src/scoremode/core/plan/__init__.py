"""Makes a plan from tokens: the windows to feed, the tokens to score, and the rule that averages the scores."""
