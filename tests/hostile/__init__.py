"""Bad inputs and kills: what a hostile user, a full disk or an impatient scheduler would do."""
