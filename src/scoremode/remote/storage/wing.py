"""What stores behind URIs hand over to the house."""

from scoremode.core.extensions import StoreOffer, Wing

WING = Wing(offers=(StoreOffer(code="remote.storage.store:STORE"),))
