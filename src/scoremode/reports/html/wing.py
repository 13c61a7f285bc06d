"""What the page hands over to the house."""

from scoremode.core.extensions import Wing

WING = Wing(
    names={"report": "reports.html.page"},
    offers={"notebook": ("reports.html.page:notebook_html",)},
)
