"""The scores of targets: their columns, the answers of engines, and how they are packed and stored."""
