"""Declares what records add to scoremode: see core/extensions.py."""

from scoremode.core.extensions import FormatOffer, Wing

WING = Wing(
    offers=(
        FormatOffer(
            name="records",
            compare={"--records DIR": "leave the record of each candidate there (with --out: in its run too)"},
            report="records, as in records/*.json, or folders of them",
            suffix=".json",
            code="studies.records.command:RECORDS",
        ),
    ),
)
