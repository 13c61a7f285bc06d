"""The instrument: all that ppl, prob, compare and references need on one machine."""
