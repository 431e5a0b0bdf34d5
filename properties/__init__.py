"""Conformance suite: claims about subjects, judged over many cases."""
