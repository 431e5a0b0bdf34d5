"""`python -m studies.speed`.  Nothing at the top: spawned ranks run this file again."""

if __name__ == "__main__":
    from studies.speed.cli import app

    app()
