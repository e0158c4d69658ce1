"""``python -m fastpatch``: see ``fastpatch._cli``."""

from fastpatch._cli import main

if __name__ == "__main__":
    main()
