"""The figures of a run: one line for each step, writers for other libraries, and plots.

`FigureLog` writes them, `read_figures` reads them, and `echelon plot` draws them. Nothing here
imports torch until a writer that needs it is made.
"""

from echelon.train.figures.file import read_figures
from echelon.train.figures.log import FigureLog
from echelon.train.figures.writers import TensorBoardWriter, WandbWriter, Writer

__all__ = ["FigureLog", "read_figures", "TensorBoardWriter", "WandbWriter", "Writer"]
