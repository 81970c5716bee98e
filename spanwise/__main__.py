"""The ``spanwise`` command, also ``python -m spanwise``: hands over to `spanwise.cli`."""

import sys

from spanwise.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
