"""The seekable layer: encode, decode (slow reference), chunking, tar and directory import, tar export. Pure: bytes in, bytes out."""

from .convert import ConvertReport, Progress, convert
from .decoder import Layer, Problem, decode_chunk, open_toc
from .encoder import DEFAULT_LEVEL, ENCODER, EncodeReport, encode
from .errors import FormatError, LayerError, SourceError, UnsupportedEntry, printable
from .model import Data, Entry, Kind
from .recipe import Recipe, RecipeReport, RecipeWriter
from .sources import open_source
from .spec import DEFAULT_CHUNK_SIZE
from .storedtoc import restore_toc
from .tarreader import read_tar
from .tarwriter import TarWriter
from .toc import Chunk, Dirent, Extent, Footer, Header, Inode, Toc, decode_footer
from .totar import export_tar
from .tree import DEFAULT_MAX_ENTRIES, LayerTree

__all__ = [
    "DEFAULT_CHUNK_SIZE",
    "DEFAULT_LEVEL",
    "DEFAULT_MAX_ENTRIES",
    "ENCODER",
    "Chunk",
    "ConvertReport",
    "Data",
    "Dirent",
    "EncodeReport",
    "Entry",
    "Extent",
    "Footer",
    "FormatError",
    "Header",
    "Inode",
    "Kind",
    "Layer",
    "LayerError",
    "LayerTree",
    "Problem",
    "Progress",
    "Recipe",
    "RecipeReport",
    "RecipeWriter",
    "SourceError",
    "TarWriter",
    "Toc",
    "UnsupportedEntry",
    "convert",
    "decode_chunk",
    "decode_footer",
    "encode",
    "export_tar",
    "open_source",
    "open_toc",
    "printable",
    "read_tar",
    "restore_toc",
]
