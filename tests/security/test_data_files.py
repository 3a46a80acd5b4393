"""Data files that carry programs or swell when they are opened."""

import http.server
import io
import json
import pickle
import stat
import struct
import threading
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from lab.data.helpers import failure, load
from lab.report.fake_runs import FakeMethod, write_comparison
from wellcond.errors import DataError, WellcondError
from wellcond.lab.data.images import decode_image
from wellcond.lab.report.page import build_report
from wellcond.lab.train.run_folder import RunFolder

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(x) (w) file closefile\n%%EOF\n"


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WELLCOND_DATA", raising=False)


def png(width, height):
    """The head of a picture of any size, in a few bytes."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def picture():
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def image_folder(root, name, content):
    for split in ("train", "val"):
        for label in ("a", "b"):
            (root / split / label).mkdir(parents=True)
            (root / split / label / "fine.png").write_bytes(picture())
    (root / "train" / "a" / name).write_bytes(content)
    return root


def test_a_decompression_bomb_is_an_error_that_names_the_file(tmp_path, run):
    root = image_folder(tmp_path / "set", "bomb.png", png(40_000, 40_000))
    split = load(source="image_folder", path=str(root)).train
    at = next(n for n, file in enumerate(split.files) if file.endswith("bomb.png"))
    with pytest.raises(DataError, match=r"bomb\.png(.|\n)*expected(.|\n)*DecompressionBombError"):
        split[at]
    small = ["--model-arg", "depth=1", "--model-arg", "embed_dim=24", "--model-arg", "num_heads=3"]
    code, _ = run("measure", "timm:vit_tiny_patch16_224", *small, "--data", root / "train" / "a")
    assert "bomb.png: the image cannot be read" in str(code)


@pytest.fixture
def ghostscript(canary, tmp_path, monkeypatch):
    """A `gs` that tells when it is run: PIL has it interpret PostScript, which is a program."""
    place = tmp_path / "bin"
    place.mkdir()
    (place / "gs").write_text(f"#!/bin/sh\ntouch {canary.path}\n")
    (place / "gs").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(place), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return canary


def test_postscript_is_not_run(ghostscript, tmp_path):
    with pytest.raises(DataError, match=r"no PostScript, which is a program"):
        decode_image(POSTSCRIPT, "evil.png")
    root = image_folder(tmp_path / "set", "evil.png", POSTSCRIPT)
    (root / "train" / "a" / "evil.eps").write_bytes(POSTSCRIPT)
    split = load(source="image_folder", path=str(root)).train
    assert not any(file.endswith(".eps") for file in split.files)
    at = next(n for n, file in enumerate(split.files) if file.endswith("evil.png"))
    with pytest.raises(DataError, match=r"evil\.png"):
        split[at]


@pytest.mark.parametrize("script", ["set.py", "evil.py"])
@pytest.mark.parametrize("source", ["hub", "text_stream"])
def test_the_script_of_a_data_set_is_not_run(source, script, canary, tmp_path, monkeypatch):
    mirror = tmp_path / "mirror" / "evil" / "set"
    mirror.mkdir(parents=True)
    (mirror / script).write_text(canary.code)
    (mirror / "dataset_infos.json").write_text("{}")
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path / "mirror"))
    fields = {"evaluation_split": "train"} if source == "hub" else {"evaluation_documents": 1}
    (mirror / "dataset_infos.json").unlink()
    assert "there are no data files" in failure(source=source, id="evil/set", **fields)


@pytest.mark.parametrize("source", ["hub", "text_stream"])
@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
def test_an_address_in_a_card_is_not_asked_for(source, card, tmp_path, monkeypatch):
    asked = []

    class Beacon(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Beacon) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirror = tmp_path / "mirror" / "evil" / "set"
        mirror.mkdir(parents=True)
        (mirror / "train.csv").write_text("text,label\na,0\nb,1\n")
        files = {"configs": [{"config_name": "default", "data_files": f"http://127.0.0.1:{server.server_port}/a.csv"}]}
        text = json.dumps(files)
        (mirror / card).write_text(f"---\n{text}\n---\n" if card == "README.md" else text)
        monkeypatch.setenv("WELLCOND_DATA", str(tmp_path / "mirror"))
        fields = {"evaluation_split": "train"} if source == "hub" else {"evaluation_documents": 1}
        if source == "text_stream":
            fields["text"] = "text"
        bundle = load(source=source, id="evil/set", **fields)
        server.shutdown()
    assert asked == [] and {bundle.train[row]["text"] for row in range(len(bundle.train))} <= {"a", "b"}


def test_a_pickle_in_the_types_of_a_parquet_file_is_not_loaded(canary, tmp_path):
    """Arrow once unpickled the types of extensions as it opened a file."""
    import pyarrow as pa
    import pyarrow.parquet

    hidden = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(canary.payload, protocol=0),
    }
    schema = pa.schema([pa.field("text", pa.string(), metadata=hidden), pa.field("label", pa.int64())])
    rows = [pa.array(["a", "b"] * 4), pa.array([0, 1] * 4)]
    pyarrow.parquet.write_table(pa.Table.from_arrays(rows, schema=schema), tmp_path / "rows.parquet")
    file = str(tmp_path / "rows.parquet")
    bundle = load(source="files", train=file, evaluation=file)
    assert bundle.train[0]["text"] == "a"


NESTED = "[" * 100_000


def test_nesting_in_data_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text(f'{{"text": {NESTED}\n')
    file = str(tmp_path / "rows.jsonl")
    assert file in failure(source="files", train=file, evaluation_fraction=0.5)
    assert file in failure(source="text_stream", files=file)


@pytest.mark.parametrize("name", ["comparison.json", "default/seed0/run.json", "default/seed0/steps.jsonl"])
def test_nesting_in_a_record_is_an_error_that_names_the_file(name, tmp_path):
    folder = write_comparison(tmp_path, [FakeMethod("default", {0: 0.9})], points=2, layers=1, heads=1)
    (folder / name).write_text(NESTED)
    with pytest.raises(WellcondError, match=name.rpartition("/")[2].replace(".", r"\.")):
        build_report(folder)
    if name.endswith("run.json"):
        with pytest.raises(WellcondError, match=r"run\.json: is not readable JSON"):
            RunFolder((folder / name).parent).read_record()
