"""Plan ─▶ Answers: the contract, the registry, and one folder per engine."""
