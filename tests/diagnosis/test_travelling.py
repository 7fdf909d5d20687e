"""What the doctor says of the way between nodes, for numbers of nodes that are not here."""

import pytest

from mpiddp.diagnosis import travelling

pytestmark = pytest.mark.once


def test_wire_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDDP_WIRE", raising=False)
    assert travelling.describe_wire(1) == []
    for found, text in zip(travelling.describe_wire(64), ("float32", "16 bits"), strict=True):
        assert found.grade == "ok"
        assert found.text.startswith(
            f"between the nodes, 4 MB of {text} in chunks: two-level: costs "
        )
    monkeypatch.setenv("MPIDDP_WIRE", "two-level")
    assert travelling.describe_wire(4)[0].text.endswith(" in chunks: two-level: asked for")
    found = travelling.describe_wire(3)[1]
    assert found.grade == "error"
    assert "not possible: MPIDDP_WIRE is two-level, but 3 nodes" in found.text
    assert found.remedy == "unset MPIDDP_WIRE"
