from __future__ import annotations

import os
import sys
from pathlib import Path

# Ranks share the cores: a thread of OpenMP that spins while it waits takes them from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))
