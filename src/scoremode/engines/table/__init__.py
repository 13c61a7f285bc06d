"""An engine whose answers are known in closed form."""
