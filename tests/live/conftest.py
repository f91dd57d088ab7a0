"""What the tests here share is in these modules; their assertions explain themselves as those of a test do."""

import pytest

pytest.register_assert_rewrite("agreement", "healing")
