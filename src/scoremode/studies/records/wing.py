"""What records hand over to the house."""

from scoremode.core.extensions import Wing

HERE = "studies.records"

WING = Wing(
    offers={"comparison-output": (f"{HERE}.command:OUTPUT",), "report-input": (f"{HERE}.command:INPUT",)},
)
