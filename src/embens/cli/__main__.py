"""``python -m embens.cli`` is the ``embens`` command."""

import sys

from embens.cli import main

sys.exit(main())
