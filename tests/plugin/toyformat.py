"""A format of another package: one file of bytes per chunk, and ``toy.json``, written last.

Each file's name begins with the name of its save, and each chunk has a CRC-32.
"""

import json
import zlib

from shardplan.io import ExistsError, FormatError
from shardplan.io.execute import collect
from shardplan.io.formats import ChunkPlace, Fault, Findings, Format, Part, Source, Writer
from shardplan.planning import (
    BytesMetadata,
    Chunk,
    Metadata,
    StorageMeta,
    TensorMetadata,
    TensorProperties,
    flatten,
)

INDEX = "toy.json"


class ToySource(Source):
    format = "toy"

    def __init__(self, store):
        self.store = store
        index = json.loads(store.read_all(INDEX, limit=1 << 20))
        self._values = index["values"]
        self._chunks, entries = {}, {}
        for name, dtype, size, offsets, sizes, file, crc in index["chunks"]:
            self._chunks.setdefault(name, []).append((dtype, sizes, file, crc))
            boxes = entries.get(name, (None, None, ()))[2]
            entries[name] = (dtype, size, (*boxes, Chunk(offsets, sizes)))
        tensors = {
            name: TensorMetadata(TensorProperties(dtype), size, chunks)
            for name, (dtype, size, chunks) in entries.items()
        }
        values = dict.fromkeys(self._values, BytesMetadata())
        meta = StorageMeta(save_id=index["save_id"])
        self.metadata = Metadata(tensors | values, storage_meta=meta)
        self.files = [file for chunks in self._chunks.values() for _, _, file, _ in chunks]

    def find_chunks(self, chunks):
        found = [self._chunks[name][number] for name, number in chunks]
        return [
            ChunkPlace(self.files.index(f), 0, dtype, tuple(size)) for dtype, size, f, _ in found
        ]

    def value(self, name, *, verify=True):
        return self._values[name]

    def faults(self):
        for name, chunks in self._chunks.items():
            for _, _, file, crc in chunks:
                if zlib.crc32(self.store.read_all(file, limit=1 << 20)) != crc:
                    yield Fault("checksum", file, "it was changed", name)


class ToyWriter(Writer):
    def refuse(self, store, overwrite):
        if not overwrite and store.exists(INDEX):
            raise ExistsError(f"{store.url} holds a toy", can_overwrite=True)

    def write(self, job):
        pieces, values, refused = collect(flatten(job.sd)[0], job.plan, progress=job.progress)
        assert not refused
        chunks, nbytes = [], 0
        for number, piece in pieces.items():
            file, data = f"{job.save_id}.{job.rank}.{number}.toy", b"".join(piece.blocks())
            nbytes += job.store.write(file, [data])
            crc = zlib.crc32(data)
            box = (piece.size, piece.offsets, piece.shape)
            chunks.append((piece.name, piece.dtype, *box, file, crc))
        report = {"chunks": chunks, "values": values}
        return Part(len(chunks), nbytes, json.dumps(report).encode())

    def commit(self, job):
        old = ToySource(job.store).files if job.store.exists(INDEX) else ()
        parts = [json.loads(report) for report in job.reports]
        index = {
            "save_id": job.save_id,
            "chunks": [chunk for part in parts for chunk in part["chunks"]],
            "values": {name: v for part in parts for name, v in part["values"].items()},
        }
        job.store.replace(INDEX, json.dumps(index).encode(), overwrite=job.overwrite)
        job.store.delete(old)
        return ()

    def discard(self, store, report, save_id):
        store.delete([chunk[5] for chunk in json.loads(report)["chunks"]])


class ToyFormat(Format):
    name = "toy"
    marks = (INDEX,)

    def detect(self, store, name=""):
        return name in ("", INDEX) and store.exists(INDEX)

    def open(self, store, name="", pool=None):
        if not store.exists(INDEX):
            raise FormatError(INDEX, "it is missing")
        return ToySource(store)

    def writer(self):
        return ToyWriter()

    def verify(self, store, name="", *, progress=None, pool=None):
        source = self.open(store)
        faults = tuple(source.faults())
        count = len(source.files)
        return Findings(faults, count, count - len(faults), save_id=source.save_id)

    def made(self, store):
        found = {entry.name: entry.written for entry in store.entries(recursive=False)}
        return found.get(INDEX)

    def save_of(self, file):
        return file.split(".")[0] if file.endswith(".toy") else None


FORMAT = ToyFormat()
