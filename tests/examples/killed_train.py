"""train_gpt.py; the first time, one of its ranks is killed in the middle of a step.

killed_train.py RANK STEP [train_gpt.py's options]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_gpt
from gpt.training.loop import Trainer

rank, step = map(int, (sys.argv.pop(1), sys.argv.pop(1)))
backward = Trainer.backward


def backward_or_die(self, batch):
    is_due = self.world.rank == rank and self.step == step
    if is_due and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return backward(self, batch)


Trainer.backward = backward_or_die
train_gpt.main()
