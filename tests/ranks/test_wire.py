"""Messages between the parent and its ranks."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivtest.base import limits
from equivtest.base.collective import Collective
from equivtest.layout import Flat, Layout, Partial, Replicate, Shard
from equivtest.ranks.backend import Backend
from equivtest.ranks.channel import Channel
from equivtest.ranks.failure import clip, describe_exception
from equivtest.ranks.messages import Probe, Start, Stop, Support, Visit, decode_request, encode_request
from equivtest.ranks.reply import Answer, Reply
from equivtest.ranks.wire import decode_message, encode_reply
from equivtest.tensors import Placed, same_bits
from tests.programs.tiny import Unspeakable

DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64", "float8_e4m3fn")
LAYOUTS = (
    Layout((Shard(0), Shard(0)), shard_order=(1, 0)),
    Layout((Flat(12),)),
    Layout((Partial("avg"), Replicate())),
    Layout(()),
)


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Any bits at all, NaN payloads and signed zeros among them; 0 and 1 only for bool."""
    generator = torch.Generator().manual_seed(seed)
    wanted = getattr(torch, dtype)
    if wanted == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    width = torch.empty((), dtype=wanted).element_size()
    numel = torch.Size(shape).numel()
    return torch.randint(0, 256, (numel * width,), generator=generator).to(torch.uint8).view(wanted).reshape(shape)


def round_trip(reply: Reply, scratch: Path, request_id: int = 7) -> Reply:
    received_id, received = decode_message(encode_reply(request_id, reply, scratch))
    assert received_id == request_id
    return received


@pytest.mark.parametrize("found", [None, (), (Collective("all_gather", 12, "backward", "processes 0, 1"),)])
def test_decoded_reply_has_the_recorded_collectives(found: tuple[Collective, ...] | None, tmp_path: Path) -> None:
    reply = Reply(rank=0, outcome="answered", answers=(Answer({}, collectives=found),))

    assert round_trip(reply, tmp_path).answers[0].collectives == found


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.sampled_from((0, 1, 2, 3, 5)), max_size=4).map(tuple),
    seed=st.sampled_from(range(100)),
    layout=st.sampled_from(LAYOUTS),
)
def test_decoded_tensors_have_the_bits_of_the_encoded_tensors(
    dtype: str, shape: tuple[int, ...], seed: int, layout: Layout, tmp_path: Path
) -> None:
    tensor = random_bits(shape, dtype, seed)
    odd = torch.zeros(3, dtype=torch.uint8)  # shifts what follows off its alignment
    sent = Answer({"odd": Placed(odd, LAYOUTS[3]), "it": Placed(tensor, layout, (7, *shape))}, {"it": True}, ("x",))
    (received,) = round_trip(Reply(rank=3, outcome="answered", answers=(sent,)), tmp_path).answers
    placed = received.tensors["it"]
    assert (placed.local.dtype, placed.local.shape) == (tensor.dtype, tensor.shape)
    assert placed.local.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    assert (placed.layout, placed.global_shape) == (layout, (7, *shape))
    assert (received.requires_grad, received.touched) == ({"it": True}, ("x",))


def test_decoded_reply_has_the_answers_of_the_first_and_the_repeated_run(tmp_path: Path) -> None:
    first, second = random_bits((3,), "bfloat16", 1), random_bits((3,), "bfloat16", 2)
    sent = Answer({"x": Placed(first, LAYOUTS[3])}, again={"x": Placed(second, LAYOUTS[3])})
    (received,) = round_trip(Reply(rank=0, outcome="answered", answers=(sent,)), tmp_path).answers

    assert same_bits(received.tensors["x"].local, first) and same_bits(received.again["x"].local, second)


def test_only_the_elements_of_a_view_are_sent(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).requires_grad_()
    placed = Placed(tensor.t()[1:3], LAYOUTS[3])
    received = (
        round_trip(Reply(rank=0, outcome="answered", answers=(Answer({"x": placed}),)), tmp_path)
        .answers[0]
        .tensors["x"]
    )
    assert same_bits(received.local, tensor.t()[1:3].detach())


def test_decoding_a_large_reply_leaves_no_file(tmp_path: Path) -> None:
    tensor = random_bits((limits.SHARED_BYTES // 4 + 1,), "float32", 1)
    message = encode_reply(
        1, Reply(rank=0, outcome="answered", answers=(Answer({"x": Placed(tensor, LAYOUTS[3])}),)), tmp_path
    )
    assert len(message) < 1000 and len(list(tmp_path.iterdir())) == 1
    received = decode_message(message)[1].answers[0].tensors["x"].local
    assert list(tmp_path.iterdir()) == [] and same_bits(received, tensor)


def test_received_tensor_is_writable(tmp_path: Path) -> None:
    for numel in (1, limits.SHARED_BYTES):
        tensor = torch.ones(numel)
        reply = Reply(rank=0, outcome="answered", answers=(Answer({"x": Placed(tensor, LAYOUTS[3])}),))
        received = round_trip(reply, tmp_path).answers[0].tensors["x"].local
        received += 1
        assert received.sum() == 2 * numel


def test_decoded_reply_without_tensors_equals_the_encoded_reply(tmp_path: Path) -> None:
    reply = Reply(
        rank=2,
        outcome="raised",
        error_type="ValueError",
        error_text="text",
        detail="trace",
        at_s=1.5,
        busy_s=0.25,
        lacking=("float16:all_reduce",),
    )
    assert round_trip(reply, tmp_path) == reply


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode(
            [
                7,
                0,
                "answered",
                [[{"x": [0, "float9", [1], [], [], None]}, {}, []]],
                "",
                "",
                "",
                0.0,
                0.0,
                [],
                b"1234",
                "",
            ]
        ),
        msgspec.msgpack.encode(
            [
                7,
                0,
                "answered",
                [[{"x": [0, "int64", [9], [], [], None]}, {}, []]],
                "",
                "",
                "",
                0.0,
                0.0,
                [],
                b"1234",
                "",
            ]
        ),
    ],
    ids=["empty", "no msgpack", "other struct", "no such dtype", "beyond the payload"],
)
def test_broken_message_raises_value_error(message: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_message(message)


@pytest.mark.parametrize(
    "request_",
    [
        Start(1, 2, Backend(imports=("a",)), "m:f", "/scratch", [(b"\xff", b"\xfe")], [b"/p\xff"], b"/"),
        Visit(3, "rowwise_linear", "m", {"schema": 1, "fields": {"leading": [1, 2]}}),
        Probe(4),
        Support(5, "all_reduce", "bfloat16"),
        Stop(),
    ],
)
def test_decoded_requests_equal_the_encoded_requests(request_: Start | Visit | Probe | Support | Stop) -> None:
    assert decode_request(encode_request(request_)) == request_


def test_channel_delivers_messages_whole_and_in_order() -> None:
    left, right = socket.socketpair()
    sender, receiver = Channel(left, send_limit_s=1), Channel(right)
    assert receiver.receive_available() == []
    for message in (b"", b"one", bytes(50_000)):
        sender.send(message)
    sender.close()
    assert receiver.receive_available() == [b"", b"one", bytes(50_000)]
    with pytest.raises(EOFError):
        receiver.receive_available()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


def test_channel_does_not_block_on_an_incomplete_message() -> None:
    left, right = socket.socketpair()
    receiver = Channel(right)
    with left:
        left.sendall((4).to_bytes(8, "little") + b"ab")
        assert receiver.receive_available() == []
        left.sendall(b"cd")
        assert receiver.receive_available() == [b"abcd"]
    receiver.close()


def test_sending_to_a_rank_that_does_not_read_raises() -> None:
    left, right = socket.socketpair()
    sender = Channel(left, send_limit_s=0.05)
    with right, pytest.raises(OSError, match="timed out"):
        sender.send(bytes(10_000_000))
    sender.close()


def test_exception_whose_str_raises_has_a_description() -> None:
    kind, text, trace = describe_exception(Unspeakable())
    assert (kind, text) == ("Unspeakable", "(its __str__ raised RuntimeError)")
    assert "Unspeakable" in trace


def test_texts_in_replies_are_bounded_and_printable() -> None:
    text = clip("head" + "x" * 10 * limits.OUTPUT_CHARS + "tail\udc80")
    assert text.startswith("head") and text.endswith("tail\\udc80") and len(text) < limits.OUTPUT_CHARS + 100


def test_traceback_keeps_only_the_first_and_last_of_successive_frames_of_torch() -> None:
    """Its own frames, and of each run of torch's the first and the last."""
    layer = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    try:
        layer(torch.ones(1, 3))
    except RuntimeError as error:
        trace = describe_exception(error)[2]

    files = re.findall(r'File "(.+)", line', trace)
    assert files[0] == __file__ and sum("/torch/" in file for file in files) == 2
    assert "more of torch)" in trace and "torch/nn/modules/linear.py" in files[-1]
