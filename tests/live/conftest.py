"""What the tests of this folder share is in `agreement`; its assertions explain themselves as those of a test do."""

import pytest

pytest.register_assert_rewrite("agreement")
