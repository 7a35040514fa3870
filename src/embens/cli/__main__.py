"""``python -m embens.cli`` is the ``embens`` command."""

import sys

from embens.cli.main import main

sys.exit(main())
