"""``--hardware``: a preset by name, or a file that ``spanwise calibrate`` wrote."""

from __future__ import annotations

from spanwise.hardware import B200, CPU_HOST, H100, H200, Hardware

PRESETS = {"h100": H100, "h200": H200, "b200": B200, "cpu": CPU_HOST}


def load_hardware(name: str) -> Hardware:
    """The preset `name`, else the `Hardware` in the file `name`; ``ValueError`` if that cannot be read."""
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    try:
        return Hardware.load(name)
    except OSError as error:
        raise ValueError(
            f"cannot read --hardware {name!r}: {error.strerror or error}; name a file that spanwise calibrate wrote, "
            f"or one of {', '.join(PRESETS)}"
        ) from error
