"""What is measured for a target: the columns, the answers of an engine, how they travel, and how they are stored."""
