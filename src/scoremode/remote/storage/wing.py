"""Declares what stores behind URIs add to scoremode: see core/extensions.py."""

from scoremode.core.extensions import StoreOffer, Wing

WING = Wing(offers=(StoreOffer(code="remote.storage.store:STORE"),))
