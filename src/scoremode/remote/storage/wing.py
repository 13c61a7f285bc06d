"""What stores behind URIs hand over to the house."""

from scoremode.core.extensions import Wing

WING = Wing(offers={"store": ("remote.storage.store:STORE",)})
