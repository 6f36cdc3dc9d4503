"""`python -m csd_optim` is `csd-optim`."""

from .cli.commands import main

if __name__ == "__main__":
    main()
