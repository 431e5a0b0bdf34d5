"""The conformance suite: claims about subjects, checked over cases."""
