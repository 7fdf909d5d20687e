"""A plugin of pytest: the ranks compare their calls as between nodes, in blocks.

make test ARGS="-p calls_in_blocks -n 2 tests/collectives"
"""

import pytest

from mpiddp.process_group import call_pages

# As where the ranks of a node can share no memory.
call_pages.make_call_table = lambda world, requests: None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about that memory."""
    left_out = [item for item in items if item.name == "test_pages_are_given_back"]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
