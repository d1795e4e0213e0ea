"""Progress bars: shown on a terminal, silent elsewhere."""

import pytest

from paged_jax.progress import track_programs, track_requests, track_weights


def drive(enabled):
    with track_weights(enabled) as progress:
        progress(1, 2)
        progress(2, 2)
    with track_programs(enabled) as progress:
        progress(0, 16, 0)
        progress(16, 16, 9)
    with track_requests(3, enabled) as progress:
        progress(1, 10, 0.5)
        progress(3, 30, 1.0)


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_written_where_standard_error_is_no_terminal(enabled, capsys):
    drive(enabled)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_bars_on_standard_error(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # how rich is told that it writes to a terminal
    drive(enabled=True)
    out, err = capsys.readouterr()
    assert out == ""
    for word in (
        "loading weights",
        "2/2",
        "compiling",
        "16/16",
        "9 from the cache",
        "0:00:00",
        "generating",
        "3/3",
        "tokens/s",
    ):
        assert word in err


def test_a_terminal_gets_none_where_they_are_not_wanted(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    drive(enabled=False)
    assert capsys.readouterr() == ("", "")


def test_an_error_passes_through_a_bar():
    with pytest.raises(KeyError), track_requests(1, enabled=True):
        raise KeyError("x")
