"""The ``spanwise`` command, also ``python -m spanwise``: hands over to `spanwise.cli`."""

from spanwise.cli.app import app


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
