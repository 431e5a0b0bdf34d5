"""Runs `python -m studies.speed`.  The module imports nothing at the top, because spawned ranks run this file again."""

if __name__ == "__main__":
    from studies.speed.cli import app

    app()
