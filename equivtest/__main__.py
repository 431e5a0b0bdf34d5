"""`python -m equivtest`, and the `equivtest` command: fixes the hash seed before it imports the command line."""

from equivtest.base.hash_seed import fix_hash_seed


def begin() -> None:
    fix_hash_seed()
    from equivtest.cli import main

    main()


if __name__ == "__main__":
    begin()
