"""python -m scoremode."""

from scoremode.cli.main import entry

if __name__ == "__main__":
    entry()
