"""The report: one HTML page that needs no network."""
