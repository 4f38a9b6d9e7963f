"""`python -m aoquant`: the `aoquant` command."""

from aoquant.cli import main

if __name__ == "__main__":
    main()
