"""`python -m shoal.cli` is `shoal`."""

from shoal.cli.app import main

if __name__ == "__main__":
    main()
