"""`python -m csd_optim` runs the `csd-optim` command."""

from .cli.commands import main

if __name__ == "__main__":
    main()
