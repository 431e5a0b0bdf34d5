"""The common base of all families: what a case is, how its values are drawn, and what subjects share."""
