"""`python -m kale_dist.cli`: the same as `kale-dist`."""

import sys

from kale_dist.cli import main

sys.exit(main())
