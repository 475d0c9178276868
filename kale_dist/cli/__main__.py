"""`python -m kale_dist.cli`: the same as `kale-dist`."""

import sys

from kale_dist.cli import main

if __name__ == "__main__":
    sys.exit(main())
