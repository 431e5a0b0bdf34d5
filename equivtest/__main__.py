"""`python -m equivtest`, and the `equivtest` command: imports the command line after the restart."""

from equivtest.base.hash_seed import fix_hash_seed


def begin() -> None:
    """Runs the command with a fixed hash seed, and ends the process with its exit code."""
    fix_hash_seed()
    from equivtest.cli import main

    main()


if __name__ == "__main__":
    begin()
