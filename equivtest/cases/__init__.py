"""The common base of all families: cases, the drawing of their values, and functions that subjects share."""
