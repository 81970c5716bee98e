"""Leave out what needs packages that are not installed; transformers 5.23 needs Python 3.11."""

from importlib.util import find_spec

NEEDS = {  # files, and what they need
    "*.py": ("transformers", "accelerate"),
    "test_trainer.py": ("datasets", "trl", "peft"),
    "test_parallel.py": ("peft",),
}
collect_ignore_glob = [files for files, packages in NEEDS.items() if not all(map(find_spec, packages))]
