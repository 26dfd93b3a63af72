"""Log, export and plot the figures (metrics) of a training run.

`FigureLog` writes the figures, `read_figures` reads them, and `echelon plot` draws them. Nothing
here imports torch until a writer that needs torch is created.
"""

from echelon.train.figures.file import read_figures
from echelon.train.figures.log import FigureLog
from echelon.train.figures.writers import TensorBoardWriter, WandbWriter, Writer

__all__ = ["FigureLog", "read_figures", "TensorBoardWriter", "WandbWriter", "Writer"]
