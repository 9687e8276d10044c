"""`python -m pivot_lab`."""

import sys

from pivot_lab.cli import main

sys.exit(main())
