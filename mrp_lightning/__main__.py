"""`python -m mrp_lightning` and the console script `mrp-lightning`."""

from mrp_lightning.commands.main import main

if __name__ == "__main__":
    main()
