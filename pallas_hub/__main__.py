"""`python -m pallas_hub` is the command line."""

import sys

from pallas_hub.cli import main

sys.exit(main())
