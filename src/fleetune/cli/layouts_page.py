"""The rules of what cannot be combined, written into their page: `python -m fleetune.cli.layouts_page docs/layouts.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from fleetune.planning.combinations import as_table

BEGIN, END = "<!-- rules: written from planning/combinations.py by `make docs` -->", "<!-- end of rules -->"


def with_rules(text: str) -> str:
    """The page with the rules as they are now. Raises ValueError where it has no place for them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} with {END} behind it")
    return f"{before}{BEGIN}\n{as_table()}{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_rules(page.read_text(encoding="utf-8")), encoding="utf-8")
