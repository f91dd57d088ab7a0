"""Make the parts of the malformed fixtures importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "fixtures"))
