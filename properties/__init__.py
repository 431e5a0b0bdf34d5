"""The conformance suite: what is claimed of which subjects over which cases."""
