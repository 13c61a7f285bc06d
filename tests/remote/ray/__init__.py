"""Replicas on real Ray clusters: several nodes on this machine, with declared GPUs."""
