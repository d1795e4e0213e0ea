"""Traces of requests: every format, what is wrong with a line, and lengths that are made up."""

import datetime
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.errors import InvalidArgument
from paged_jax.request_trace import Lengths, made_up_trace, read_trace

CSV = "arrival_s,prompt_tokens,output_tokens\n"


def write(tmp_path, text, name="trace"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows(trace):
    return list(
        zip(
            trace.arrival_s.tolist(),
            trace.prompt_tokens.tolist(),
            trace.output_tokens.tolist(),
            strict=True,
        )
    )


def refused(path, **options):
    with pytest.raises(InvalidArgument) as caught:
        read_trace(path, **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


# -- formats -----------------------------------------------------------------------------------------------


def test_the_projects_own_csv_is_read(tmp_path):
    trace = read_trace(write(tmp_path, CSV + "0.047,2358,531\n0.348,1034,769\n"))
    assert rows(trace) == [(0.047, 2358, 531), (0.348, 1034, 769)]
    assert trace.places == ("line 2", "line 3")
    assert (len(trace), trace.hash_ids, trace.skipped, trace.note) == (2, None, (), "")
    assert trace.total_tokens.tolist() == [2889, 1803]
    assert trace.span_s == pytest.approx(0.301)


def test_columns_may_stand_in_any_order_among_others(tmp_path):
    text = "user, output_tokens ,arrival_s,prompt_tokens\nme,3,0,5\n\n , ,,\nyou, 4 ,1.5,6.0\n"
    assert rows(read_trace(write(tmp_path, text))) == [(0, 5, 3), (1.5, 6, 4)]


@pytest.mark.parametrize("text", [CSV.replace("\n", "\r\n") + "0,5,3\r\n", "\ufeff" + CSV + "0,5,3"])
def test_windows_line_ends_and_a_byte_order_mark_are_no_matter(text, tmp_path):
    assert rows(read_trace(write(tmp_path, text))) == [(0, 5, 3)]


def test_azures_columns_are_recognised_and_their_times_count_from_the_first(tmp_path):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
        "2023-11-17 00:00:00+00:00,110,27\n"
    )
    trace = read_trace(write(tmp_path, text))
    assert trace.arrival_s == pytest.approx([0, 0.052, 20576.02004], abs=1e-5)
    assert trace.prompt_tokens.tolist() == [4808, 3180, 110]


def test_burstgpts_columns_are_recognised(tmp_path):
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"
    )
    assert rows(read_trace(write(tmp_path, text))) == [(5, 472, 18), (45, 1087, 230)]


def test_mooncakes_lines_count_milliseconds_and_hash_blocks_of_512(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [0]},
        {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]},
    ]
    trace = read_trace(write(tmp_path, "\n".join(map(json.dumps, lines)) + "\n"))
    assert rows(trace) == [(0, 6, 5), (1.5, 600, 7)]
    assert trace.hash_ids == ((0,), (0, 1))
    assert trace.hash_block_size == 512


def test_qwen_bailians_lines_count_seconds_and_hash_blocks_of_16(tmp_path):
    line = {"chat_id": 1, "timestamp": 61.5, "input_length": 33, "output_length": 5, "hash_ids": [4, 5, 6]}
    trace = read_trace(write(tmp_path, json.dumps(line)))
    assert (rows(trace), trace.hash_block_size) == ([(61.5, 33, 5)], 16)


def test_a_hash_block_size_that_the_format_does_not_state_is_found(tmp_path):
    lines = [
        {"timestamp": i, "input_length": 64 * i, "output_length": 1, "hash_ids": list(range(i))}
        for i in range(1, 9)
    ]
    trace = read_trace(write(tmp_path, "\n".join(map(json.dumps, lines))))
    assert trace.hash_block_size == 64


def test_json_may_have_the_projects_own_names_as_lines_or_as_a_list(tmp_path):
    records = [{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 3}] * 2
    lines = read_trace(write(tmp_path, "\n".join(map(json.dumps, records))))
    listed = read_trace(write(tmp_path, json.dumps(records)))
    assert rows(lines) == rows(listed) == [(0, 5, 3)] * 2
    assert (lines.places[1], listed.places[1]) == ("line 2", "entry 2")


TALK = [
    {"from": "human", "value": "a" * 40},
    {"from": "gpt", "value": "b" * 10},
    {"from": "human", "value": "c" * 20},
    {"from": "gpt", "value": "d" * 8},
]


def test_every_answer_of_a_conversation_is_a_request_after_all_that_was_said(tmp_path):
    path = write(tmp_path, json.dumps([{"id": "x", "conversations": TALK}]))
    trace = read_trace(path)
    assert rows(trace) == [(0, 10, 3), (0, 18, 2)]
    assert trace.places == ("entry 1, turn 2", "entry 1, turn 4")
    assert trace.note == "lengths estimated at 4 characters a token"
    assert rows(read_trace(path, characters_per_token=2)) == [(0, 20, 5), (0, 35, 4)]
    counted = read_trace(path, count_tokens=len)
    assert (rows(counted), counted.note) == ([(0, 40, 10), (0, 70, 8)], "")


def test_messages_with_roles_are_conversations_too(tmp_path):
    turns = [{"role": "user", "content": "abcd"}, {"role": "assistant", "content": "efghi"}]
    trace = read_trace(write(tmp_path, json.dumps([{"messages": turns}])), count_tokens=len)
    assert rows(trace) == [(0, 4, 5)]


def test_conversations_may_stand_one_on_a_line(tmp_path):
    lines = [
        json.dumps({"conversations": TALK}),
        "",
        "{",
        json.dumps({"messages": []}),
        json.dumps({"conversations": TALK[:2]}),
    ]
    path = write(tmp_path, "\n".join(lines))
    assert "line 3: expected an object with a list under conversations or messages" in refused(path)
    trace = read_trace(path, skip_invalid=True)
    assert rows(trace) == [(0, 10, 3), (0, 18, 2), (0, 10, 3)]
    assert trace.places == ("line 1, turn 2", "line 1, turn 4", "line 5, turn 2")
    assert [one.place for one in trace.skipped] == ["line 3", "line 4"]
    assert "characters a token" in trace.note


def test_of_bad_conversations_the_good_requests_are_kept_where_that_is_asked_for(tmp_path):
    entries = [
        {"conversations": [{"from": "gpt", "value": "hello"}, *TALK[:2]]},
        {"conversations": []},
        {"conversations": TALK[:1]},
        {"conversations": [TALK[0], {"from": "gpt", "value": ""}]},
        {"conversations": [TALK[0], {"from": "gpt"}, *TALK]},
        "text",
    ]
    path = write(tmp_path, json.dumps(entries))
    assert "entry 1, turn 1: nothing comes before this answer" in refused(path)
    trace = read_trace(path, skip_invalid=True, count_tokens=len)
    assert trace.skipped[3].reason == "this answer is empty"
    assert rows(trace) == [(0, 45, 10)]
    assert [one.place for one in trace.skipped] == [
        "entry 1, turn 1",
        "entry 2",
        "entry 3",
        "entry 4, turn 2",
        "entry 5, turn 2",
        "entry 6",
    ]


# -- bad files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1,-3,5", "prompt_tokens='-3': expected a whole number of tokens, from 1 to 16,777,216"),
        ("1,5,0", "output_tokens='0': expected a whole number"),
        ("1,5,2.5", "output_tokens='2.5'"),
        ("1,nan,5", "prompt_tokens='nan'"),
        ("1,inf,5", "prompt_tokens='inf'"),
        ("1,5,9999999999999", "output_tokens='9999999999999'"),
        ("1,five,5", "prompt_tokens='five'"),
        ("nan,5,5", "arrival_s='nan': expected a time"),
        ("inf,5,5", "arrival_s='inf': expected a time of 1e+11 seconds at most"),
        ("1e300,5,5", "arrival_s='1e300': expected a time of 1e+11 seconds at most"),
        ("1,16777217,5", "prompt_tokens='16777217': expected a whole number of tokens, from 1 to 16,777,216"),
        ("-1,5,5", "arrival_s='-1'"),
        ("soon,5,5", "arrival_s='soon'"),
        ("0.5,5,5", "arrival_s='0.5': earlier than the request before; expected arrivals in order"),
        ("1,5", "2 values: expected 3"),
        ("1,5,5,5", "4 values: expected 3"),
        ("1,,5", "prompt_tokens missing"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_or_skipped_and_counted(line, told, tmp_path):
    path = write(tmp_path, CSV + f"1,7,8\n{line}\n1,9,10\n")
    message = refused(path)
    assert f"line 3: {told}" in message
    assert "--skip-invalid" in message
    trace = read_trace(path, skip_invalid=True)
    assert rows(trace) == [(1, 7, 8), (1, 9, 10)]
    ((place, reason),) = trace.skipped
    assert (place, told in reason) == ("line 3", True)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"timestamp": 1', "expected a JSON object on one line"),
        ("[1, 2]", "a JSON list: expected an object"),
        ('{"timestamp": 1, "input_length": 5}', "output_length missing"),
        ('{"timestamp": 1, "input_length": true, "output_length": 5}', "input_length=True"),
        ('{"timestamp": null, "input_length": 5, "output_length": 5}', "timestamp missing"),
        ('{"timestamp": 1, "input_length": 5, "output_length": NaN}', "output_length=nan"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5}', "hash_ids='None': expected a list"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1.5]}', "hash_ids="),
        ('{"timestamp": 1, "input_length": 513, "output_length": 5, "hash_ids": [1]}', "1 hash_ids for"),
    ],
)
def test_a_bad_line_of_json_is_named_too(line, told, tmp_path):
    good = '{"timestamp": 1, "input_length": 513, "output_length": 5, "hash_ids": [1, 2]}'
    path = write(tmp_path, f"{good}\n{line}\n{good}\n")
    assert "line 2: " in refused(path)
    assert told in refused(path)
    assert len(read_trace(path, skip_invalid=True)) == 2


def test_dates_that_are_none_are_named(tmp_path):
    path = write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n12:30,5,5\n")
    assert "line 2: TIMESTAMP='12:30': expected a date" in refused(path)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (
            "arrival_s,prompt_tokens,answer\n",
            "line 1: output_tokens missing (found: arrival_s, prompt_tokens",
        ),
        ("Timestamp,Request tokens\n", "Response tokens missing"),
        ("TIMESTAMP,ContextTokens\n", "GeneratedTokens missing"),
        ("a,b,c\n1,2,3\n", "no column that a trace has (found: a, b, c); expected arrival_s, prompt_tokens"),
        ("prompt_tokens,arrival_s,output_tokens,arrival_s\n", "a column is named twice"),
        ('{"input_length": 5, "output_length": 5}', "line 1: timestamp missing"),
        ("[1, 2]", "entry 1: no column that a trace has"),
    ],
)
def test_missing_columns_are_named_with_the_formats_that_there_are(header, told, tmp_path):
    assert told in refused(write(tmp_path, header))
    assert told in refused(write(tmp_path, header), skip_invalid=True)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "the file is empty"),
        (" \n\n", "the file is empty"),
        (",,\n , \n", "nothing but commas"),
        (CSV, "no requests"),
        ("[]", "the list is empty"),
        ("[1,", "expected a JSON list"),
        ("{", "line 1: expected a JSON object"),
        (b"\xff\xfe\x00\x01", "expected a text file in UTF-8"),
        (CSV + '1,"5,5\n', "line 2: no CSV"),
        ("[" * 100_000, "expected a JSON list"),
    ],
)
def test_a_file_that_holds_no_requests_says_so(content, told, tmp_path):
    path = write(tmp_path, content)
    assert told in refused(path)
    assert told in refused(path, skip_invalid=True)


def test_a_file_that_is_not_there_or_a_folder_says_so(tmp_path):
    assert "expected a text file" in refused(tmp_path / "nowhere")
    assert "expected a text file" in refused(tmp_path)


def test_a_file_of_bad_lines_alone_is_refused_even_where_they_may_be_skipped(tmp_path):
    path = write(tmp_path, CSV + "0,0,1\n0,1,0\n")
    message = refused(path, skip_invalid=True)
    assert "line 2: prompt_tokens='0'" in message
    assert "All 2 requests had to be skipped" in message


def test_characters_per_token_are_a_number_above_zero(tmp_path):
    with pytest.raises(InvalidArgument, match="characters_per_token=0"):
        read_trace(write(tmp_path, CSV), characters_per_token=0)


def test_requests_that_are_too_long_are_refused_by_line_or_skipped(tmp_path):
    lines = [
        {"timestamp": i, "input_length": 1000 * i, "output_length": 10, "hash_ids": list(range(2 * i))}
        for i in (1, 2, 3)
    ]
    path = write(tmp_path, "\n".join(map(json.dumps, lines)))
    trace = read_trace(path)
    assert trace.within(3010, "the limit") is trace
    with pytest.raises(InvalidArgument, match=r"line 3: prompt 3000 \+ answer 10 = 3010 tokens.*the limit"):
        trace.within(3009, "the limit")
    kept = trace.within(3009, "the limit", skip_invalid=True)
    assert (len(kept), kept.places, len(kept.hash_ids)) == (2, ("line 1", "line 2"), 2)
    assert [one.place for one in kept.skipped] == ["line 3"]
    with pytest.raises(InvalidArgument, match="All 3 requests"):
        trace.within(10, "the limit", skip_invalid=True)


# -- properties --------------------------------------------------------------------------------------------

REQUESTS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(1, 10**5), st.integers(1, 10**5)), min_size=1, max_size=30
).map(lambda items: sorted(items, key=lambda item: item[0]))
"""(milliseconds, prompt, answer)"""


def _azure(milliseconds):
    start = datetime.datetime(2024, 5, 10, 23, 59)
    return str(start + datetime.timedelta(milliseconds=milliseconds))


WRITERS = {
    "paged_jax": (CSV, lambda t, p, o: f"{t / 1000},{p},{o}"),
    "burstgpt": ("Timestamp,Request tokens,Response tokens\n", lambda t, p, o: f"{t / 1000},{p},{o}"),
    "azure": ("TIMESTAMP,ContextTokens,GeneratedTokens\n", lambda t, p, o: f"{_azure(t)},{p},{o}"),
    "mooncake": (
        "",
        lambda t, p, o: json.dumps(
            {"timestamp": t, "input_length": p, "output_length": o, "hash_ids": list(range(-(-p // 512)))}
        ),
    ),
}


@settings(deadline=None)
@given(requests=REQUESTS, form=st.sampled_from(sorted(WRITERS)))
def test_what_is_written_in_any_format_is_read_back(requests, form, tmp_path_factory):
    header, line = WRITERS[form]
    path = write(tmp_path_factory.mktemp("t"), header + "\n".join(line(*one) for one in requests))
    trace = read_trace(path)
    times = np.array([milliseconds for milliseconds, _, _ in requests]) / 1000
    assert trace.arrival_s == pytest.approx(times - times[0] if form == "azure" else times, abs=2e-6)
    assert trace.prompt_tokens.tolist() == [prompt for _, prompt, _ in requests]
    assert trace.output_tokens.tolist() == [output for _, _, output in requests]
    if form == "mooncake":
        assert [len(ids) for ids in trace.hash_ids] == [
            -(-p // trace.hash_block_size) for _, p, _ in requests
        ]


@settings(deadline=None)
@given(requests=REQUESTS, form=st.sampled_from(sorted(WRITERS)), data=st.data())
def test_a_spoilt_line_is_always_named_and_skipping_keeps_the_others(requests, form, data, tmp_path_factory):
    header, line = WRITERS[form]
    lines = [line(*one) for one in requests]
    place = data.draw(st.integers(0, len(lines)))
    bad = data.draw(st.sampled_from(["x,y,z", "{}", "-1,-1,-1", "\x00", "[", '"', "1,2,3,4,5,6"]))
    folder = tmp_path_factory.mktemp("t")
    at = place + 1 + bool(header)
    if not header and place == 0:
        return  # the first line of JSON decides what the file is
    path = write(folder, header + "\n".join([*lines[:place], bad, *lines[place:]]))
    assert f"line {at}: " in refused(path) or bad == '"'
    if bad == '"':
        return  # an open quote swallows what follows: no line after it can be trusted
    trace = read_trace(path, skip_invalid=True)
    assert trace.prompt_tokens.tolist() == [prompt for _, prompt, _ in requests]
    assert [one.place for one in trace.skipped] == [f"line {at}"]


@settings(deadline=None, max_examples=300)
@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_garbage_is_an_error_of_ours_or_a_valid_trace(content, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("t"), content)
    for prefix in (b"", CSV.encode(), b'[{"conversations": '):
        path.write_bytes(prefix + content)
        try:
            trace = read_trace(path, skip_invalid=True)
        except InvalidArgument:
            continue
        assert (trace.total_tokens >= 2).all()
        assert (np.diff(trace.arrival_s) >= 0).all()


# -- made up -----------------------------------------------------------------------------------------------


def test_made_up_lengths_have_the_mean_and_the_spread_that_were_asked_for():
    trace = made_up_trace(5000, prompt=Lengths(400, 300), output=Lengths(100), requests_per_second=2)
    assert trace.prompt_tokens.mean() == pytest.approx(400, rel=0.01)
    assert trace.prompt_tokens.std() == pytest.approx(300, rel=0.03)
    assert set(trace.output_tokens.tolist()) == {100}
    assert trace.span_s == pytest.approx(2500, rel=0.1)
    assert (np.diff(trace.arrival_s) >= 0).all()


def test_the_same_seed_makes_the_same_trace_and_another_seed_another():
    def lengths(seed):
        trace = made_up_trace(50, prompt=Lengths(40, 30), output=Lengths(9, 9), seed=seed)
        return rows(trace)

    assert lengths(1) == lengths(1) != lengths(2)


def test_without_a_rate_all_arrive_at_once():
    assert made_up_trace(3, prompt=Lengths(4), output=Lengths(5)).arrival_s.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Lengths(0),
        lambda: Lengths(float("nan")),
        lambda: Lengths(5, -1),
        lambda: Lengths(5, float("inf")),
        lambda: made_up_trace(0, prompt=Lengths(4), output=Lengths(5)),
        lambda: made_up_trace(1, prompt=Lengths(4), output=Lengths(5), requests_per_second=0),
    ],
)
def test_what_is_no_distribution_is_refused(make):
    with pytest.raises(InvalidArgument, match="expected"):
        make()
