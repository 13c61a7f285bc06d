"""Final hidden state -> what is asked of it. One definition, several speeds, every engine."""
