"""Tokens ─▶ Plan: which windows are fed, which tokens are scored, how the scores are averaged."""
