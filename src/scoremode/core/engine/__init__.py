"""The contract between scoremode and its engines, and what all engines share."""
