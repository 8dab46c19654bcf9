"""Saves a checkpoint every few hundred milliseconds: into a new folder, deleting old ones, and into one folder again
and again.

usage: saving_loop.py FOLDER

It ends when its standard input does. Every value of a save is the number of the save. New folders have several files
each, the folder that is saved over has one.
"""

import itertools
import select
import shutil
import sys
import warnings
from pathlib import Path

import torch

from training import save_whole


def main(folder):
    warnings.simplefilter("ignore")
    for number in itertools.count():
        if select.select([sys.stdin], [], [], 0.1)[0]:
            break
        of = float(number)
        state = {"rows": torch.full((300, 200), of), "columns": torch.full((200, 333), of), "scalar": torch.tensor(of)}
        save_whole(folder / f"step-{number}", {"model": state, "step": number}, thread_count=3)
        save_whole(folder / "same", {"model": state, "step": number})
        shutil.rmtree(folder / f"step-{number - 3}", ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
