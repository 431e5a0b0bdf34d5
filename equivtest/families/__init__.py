"""Contains one folder per family of subjects under test.

`equivtest.cases.parts` finds a family by the name of its folder.
"""
