"""One test a kernel, dtype, pass and shard. The plugin supplies the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fa_verify.suite.shard import Shard


def test_kernel(fa_verify_shard: Shard) -> None:
    """The kernel is right on every case drawn for this shard."""
    finding = fa_verify_shard.run()
    if finding is not None:
        pytest.fail(finding, pytrace=False)
    if fa_verify_shard.verified == 0:
        pytest.skip(f"nothing verified: {fa_verify_shard.reason}")
