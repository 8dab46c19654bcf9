"""`python -m ckptfs` is the command `ckptfs`."""

import sys

from ckptfs._command import main

sys.exit(main())
