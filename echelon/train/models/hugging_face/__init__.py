"""Import models from `transformers` folders, and export models to such folders."""

from echelon.train.models.hugging_face.config_file import read_config
from echelon.train.models.hugging_face.reading import load_pretrained, load_weights
from echelon.train.models.hugging_face.writing import convert, save_pretrained

__all__ = ["read_config", "load_pretrained", "load_weights", "save_pretrained", "convert"]
