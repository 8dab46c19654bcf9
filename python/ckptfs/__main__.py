"""`python -m ckptfs` is the command `ckptfs`."""

import sys

from ckptfs.cli import main

sys.exit(main())
