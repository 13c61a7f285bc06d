"""What a user asks for, one file per verb."""
