"""Every decoder that comes with headrace, and what it gives for a class of the user's, under one contract."""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from builders import videos
from builders.numbers import npy, saved
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2, timestamp_pb2
from PIL import Image
from unit.decoding import SMOOTH, picture

import headrace as hr
from headrace.formats import decoders
from headrace.formats.decoders import IMAGE_EXTENSIONS, IMAGE_SPECS, MessageDecoder, decode_pt
from headrace.formats.media import ImageDecoder, decode_audio, decode_audio_by_torchcodec
from headrace.testing import DecoderContract

soundfile = pytest.importorskip("soundfile")
msgpack = pytest.importorskip("msgpack")


class OurContract(DecoderContract):
    by: ClassVar[Callable[[bytes], object]]

    def decode(self, data: bytes) -> object:
        return self.by(data)


class TestInt(OurContract):
    extension = "cls"
    examples = [(b"0", 0), (b"-17\n", -17), (b"+3", 3)]
    damaged = [b"", b"1.5", b"1_0", b"\xff"]
    by = staticmethod(decoders.decode_int)


class TestText(OurContract):
    extension = "txt"
    examples = [(b"", ""), ("grüße\n".encode(), "grüße\n")]
    damaged = [b"\xff", "ü".encode()[:1]]
    by = staticmethod(decoders.decode_text)


class TestJson(OurContract):
    extension = "json"
    examples = [(b"null", None), (b'{"a": [1, 2.5, "x", true]}', {"a": [1, 2.5, "x", True]})]
    damaged = [b"", b"{", b"{} {}", b"[" * 200_000]
    by = staticmethod(decoders.decode_json)


class TestNpy(OurContract):
    extension = "npy"
    values = [np.arange(6, dtype=np.int16).reshape(2, 3), np.zeros((0, 4), np.float32), np.array(2.5)]
    examples = [(npy(value), value) for value in values]
    damaged = [b"", npy(values[0])[:-1], npy(np.array([print], object))]
    by = staticmethod(decoders.NpyDecoder())


class TestNpz(OurContract):
    extension = "npz"
    value = {"x": np.arange(3), "y": np.ones((2, 2), np.float32)}
    examples = [(saved(np.savez, **value), value)]
    damaged = [b"", saved(np.savez, **value)[:-30], saved(np.savez, x=np.array([print], object))]
    by = staticmethod(decoders.decode_npz)


class TestMsgpack(OurContract):
    extension = called = "msgpack"
    examples = [(msgpack.packb(value), value) for value in (None, {"a": [1, b"\0", "ü"], 3: 1.5})]
    damaged = [b"", b"\xdd\xff\xff\xff\xff", b"\x01\x02", b"\x91" * 5000]
    by = staticmethod(decoders.decode_msgpack)


def saved_tensors(value: Any) -> bytes:
    torch.save(value, out := io.BytesIO())
    return out.getvalue()


class Trap:
    def __reduce__(self) -> Any:
        return print, ("run",)


class TestTensors(OurContract):
    extension = called = "pt"
    values = [torch.arange(4), {"t": torch.ones(2, 3, dtype=torch.bfloat16), "n": [1, "x"]}]
    examples = [(saved_tensors(value), value) for value in values]
    damaged = [b"", saved_tensors(values[0])[:200], saved_tensors(Trap()), pickle.dumps(Trap())]
    by = staticmethod(decode_pt)


def sound(kind: str) -> tuple[bytes, object]:
    heard = (np.sin(np.arange(400) / 9)[:, None] * [0.5, -0.25]).astype(np.float32)
    soundfile.write(out := io.BytesIO(), heard, 16000, format=kind, subtype="PCM_24")
    array, rate = soundfile.read(io.BytesIO(out.getvalue()), dtype="float32")
    return out.getvalue(), {"array": np.ascontiguousarray(array.T), "rate": rate}


class TestAudio(OurContract):
    extension, called = "flac", "audio"
    examples = [sound("FLAC"), sound("WAV")]
    damaged = [b"", b"RIFF" + bytes(40), sound("FLAC")[0][:200]]
    by = staticmethod(decode_audio)


class TestAudioByTorchcodec(TestAudio):
    extension, called = "wav", "audio:torchcodec"

    @pytest.fixture(autouse=True)
    def _is_there(self) -> None:
        videos.torchcodec()

    by = staticmethod(decode_audio_by_torchcodec)


class Images(OurContract):
    spec: ClassVar[str]
    extension = "png"
    damaged = [b"", picture("PNG")[:100], b"GIF89a"]

    def decode(self, data: bytes) -> object:
        return ImageDecoder(self.spec)(data)


class TestImagesInColour(Images):
    spec = "rgb8"
    options = {"spec": spec}
    examples = [(picture(kind), SMOOTH) for kind in ("PNG", "BMP", "PPM", "TIFF")]


class TestImagesInGray(Images):
    spec = "l8"
    options = {"spec": spec}
    examples = [(picture("PNG", SMOOTH[:, :, 0]), SMOOTH[:, :, 0])]


class TestImagesAsPlanes(Images):
    spec = "torch"
    options = {"spec": spec}
    examples = [(picture("PNG"), np.ascontiguousarray(SMOOTH.transpose(2, 0, 1)))]


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


class TestImagesOfPillow(Images):
    spec = "pil"
    options = {"spec": spec}
    examples = [(data, opened(data)) for data in (picture("PNG"), picture("GIF", mode="P"))]


class TestPickle(OurContract):
    extension = "pkl"
    options = {"allow_pickle": True}
    values = [None, {"a": [1, (2.5, "x")], "v": np.arange(3)}]
    examples = [(pickle.dumps(value), value) for value in values]
    damaged = [b"", b"(", pickle.dumps(values[1])[:-3], pickle.dumps(1) + b"more", b"cno_such_module\nname\n."]
    by = staticmethod(decoders.decode_pickle)


class TestPickleByName(TestPickle):
    extension, called = "bin", "pickle"


TIME = timestamp_pb2.Timestamp(seconds=-3, nanos=7)
TREE = struct_pb2.Struct()
TREE.update({"boxes": [[1, 2, 3.5]], "name": "ü"})


class TestMessages(OurContract):
    extension, called = "time", timestamp_pb2.Timestamp
    examples = [(TIME.SerializeToString(), TIME), (b"", timestamp_pb2.Timestamp())]
    damaged = [b"\x08", b"\xff" * 5, TIME.SerializeToString()[:-1], b"\x08\x01\x0c"]
    by = staticmethod(MessageDecoder(timestamp_pb2.Timestamp))


class TestRegisteredMessages(OurContract):
    extension = "tree"
    examples = [(TREE.SerializeToString(), TREE)]
    damaged = [TREE.SerializeToString()[:-1]]

    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decoders, "_registered", {})
        hr.plugins.register_decoder("tree", struct_pb2.Struct)

    by = staticmethod(MessageDecoder(struct_pb2.Struct))


class Plain:
    """A class of another library, which can do no more than parse."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def ParseFromString(self, data: bytes) -> int:
        self.text = data.decode()
        return len(data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and other.text == self.text

    __hash__ = None  # type: ignore[assignment]


class TestMessagesThatOnlyParse(OurContract):
    extension, called = "plain", Plain
    examples = [(b"abc", Plain("abc"))]
    damaged = [b"\xff"]
    by = staticmethod(MessageDecoder(Plain))


def test_every_decoder_is_here() -> None:
    called = {case.called for case in _cases()} | {case.options.get("spec") for case in _cases()}
    extensions = {case.extension for case in _cases()}
    for name in decoders.NAMES:
        covered = name in called or {"int": "cls", "text": "txt"}.get(name, name) in extensions
        assert covered or name == "bytes", f"{name!r} keeps no contract"
    assert extensions & IMAGE_EXTENSIONS
    assert set(IMAGE_SPECS) <= called


def _cases() -> Sequence[type[DecoderContract]]:
    here = [value for name, value in globals().items() if name.startswith("Test")]
    return [value for value in here if isinstance(value, type) and issubclass(value, DecoderContract)]


def test_message_without_what_it_must_have_is_damage() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="box.proto", package="boxes", syntax="proto2")
    file.message_type.add(name="Box").field.add(name="wide", number=1, type=5, label=2)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    box = message_factory.GetMessageClass(pool.FindMessageTypeByName("boxes.Box"))
    data = hr.from_map([{"__key__": "k", "x": box(wide=3).SerializeToString()}, {"__key__": "k", "x": b""}])
    assert data.decode(x=box)[0]["x"].wide == 3
    with pytest.raises(hr.DecodeError, match=r"'x' does not decode as a message Box: fields .* missing: wide"):
        data.decode(x=box)[1]


def test_messages_come_from_workers() -> None:
    samples = [{"__key__": str(n), "x": timestamp_pb2.Timestamp(seconds=n).SerializeToString()} for n in range(4)]
    data = hr.from_map(samples).decode(x=timestamp_pb2.Timestamp).to_tuple("x")
    with hr.DataLoader(data, batch_size=2, num_workers=1, collate_fn=list) as loader:
        assert [x.seconds for batch in loader for (x,) in batch] == [0, 1, 2, 3]


def test_pickles_are_refused_unless_they_are_allowed() -> None:
    data = hr.from_map([{"__key__": "k", "x": pickle.dumps(1), "pkl": pickle.dumps(2), "a.pickle": pickle.dumps(3)}])
    with pytest.raises(hr.OptionError, match=r"x='pickle' needs allow_pickle=True: .* runs code"):
        data.decode(x="pickle")
    assert {type(value) for value in data.decode()[0].values()} == {str, bytes}
    allowed = data.decode(x="pickle", allow_pickle=True)
    assert allowed[0] == {"__key__": "k", "x": 1, "pkl": 2, "a.pickle": 3}
    assert data.decode(allow_pickle=True, pkl="bytes").to_tuple("pkl", "x")[0] == (pickle.dumps(2), pickle.dumps(1))
    assert data.decode(allow_pickle=True).to_tuple("pkl")[0] == (2,)
