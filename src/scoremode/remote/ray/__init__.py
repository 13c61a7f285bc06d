"""Runs one model as several replicas on a Ray cluster, behind the interface of one engine.

plan ──batches──▶ pieces of work ──▶ replica 1 … N (Ray actors with an engine) ──blocks──▶ answers, in any order

Ray is imported only when replicas are started.
"""
