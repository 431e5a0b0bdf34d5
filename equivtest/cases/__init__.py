"""The common base of all families: cases, values, right answers, subjects and defects."""
