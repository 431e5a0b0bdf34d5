"""Records, spoils or watches the collectives of a rank while a subject runs."""
