"""Bytes: stores, the format, and carrying out the reads and writes that a plan says.

- Where do bytes go? `stores`, `local`, `local_files`, `objects`, `folders`, `pool`, `buffers`
- What is in a file? `headers`, `manifest_record`, `manifest` (its text), `expected`, `values`,
  `checksums`
- Which formats are there? `sources` (reading), `writers` (saving); `native` (our own); `dcp`,
  `dcp_metadata`, `dcp_ranks`, `dcp_write`; `hf`, `hf_index`, `hf_shards`, `hf_file`,
  `hf_write`; `torchsave`, `torchsave_write`
- How is another tool's file read without running it? `pickles` (the unpickler), `torchpickles`
  (what a pickle may name), `standins` (values built of what it describes), `archived`,
  `torchvalues`, `torchsave_pickles`, `torchzip`, `torchzip_write`, `strided`; is it sound?
  `verify_foreign`
- How is a plan carried out? `pieces`, `write`, `commit`, `read`, `jobs`, `fetch`, `arrays`
- How does one checkpoint become another? `ahead`, `proof`, `places`, `copying`, `crc`
- How does one take another's place? `replacing`; what do killed saves leave? `leftovers`
- Is it sound, are two alike? `verify`, `scan`, `compare`, `blocksums`, `progress`
- What can go wrong? `errors`, `store_errors`; how large may things be? `limits`
- How do I test against a failing store? `testing`

torch is imported only by the modules that touch tensors.
"""

from .errors import ExistsError, FormatError, LoadError, UnsureCommitError, ValueRefusedError
from .pool import Pool, default_pool
from .stores import MissingFileError, Store, StoreError, open_store

__all__ = [
    "ExistsError",
    "FormatError",
    "LoadError",
    "MissingFileError",
    "Pool",
    "Store",
    "StoreError",
    "UnsureCommitError",
    "ValueRefusedError",
    "default_pool",
    "open_store",
]
