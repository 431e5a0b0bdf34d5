"""`python -m benchmarks`.  Nothing at the top: spawned ranks run this file again."""

if __name__ == "__main__":
    from benchmarks.cli import app

    app()
