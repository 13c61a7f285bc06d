"""What attributions need of each engine."""
