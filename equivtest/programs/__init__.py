"""Programs of users, judged against the unsharded module: a module, parallelized, or steps of its training.

What describes a program lies here, beside what decides which cases can be judged.  `oracle/` says what is right, `run/`
is what a rank runs, and neither imports the other.
"""

SUBJECTS = {
    "module": "equivtest.programs.run.module:module",
}
