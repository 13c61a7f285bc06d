"""Declares what the HTML page adds to scoremode: see core/extensions.py."""

from scoremode.core.extensions import PageOffer, Wing

WING = Wing(
    names={"report": "reports.html.page"},
    offers=(
        PageOffer(
            shows=(
                "core.store.run:Run",
                "core.statistics.comparison:Comparison",
                "core.statistics.comparison:Comparisons",
            ),
            code="reports.html.page:RESULTS",
        ),
    ),
)
