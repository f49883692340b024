"""`python -m draftheads` is `draftheads`."""

from draftheads.scripts.cli import main

if __name__ == "__main__":
    main()
