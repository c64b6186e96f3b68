"""docs/composition.md names a test for each claim, and these tests exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "composition.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)))


def test_every_test_that_the_page_names_exists():
    assert len(NAMED) > 30
    missing = [f"{path}::{name}" for path, name in NAMED if f"def {name}(" not in (ROOT / path).read_text()]
    assert missing == []


def test_every_row_of_a_table_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not re.match(r"\| (what|---|order)", line)]
    assert len(rows) > 30
    assert [row for row in rows if "::test_" not in row] == []
