"""The table of GPUs, and sizes written for people."""

import pytest

from paged_jax.capacity import GIB
from paged_jax.devices import DEVICES, device_of
from paged_jax.errors import InvalidArgument


@pytest.mark.parametrize(
    ("name", "gigabytes", "terabytes_per_second", "tera_flops"),
    [
        ("h100", 80, 3.35, 989),
        ("h200", 141, 4.8, 989),
        ("a100-40", 40, 1.555, 312),
        ("a100-80", 80, 2.039, 312),
        ("l4", 24, 0.3, 121),
        ("rtx4090", 24, 1.008, 165.2),
    ],
)
def test_a_device_has_what_its_data_sheet_says(name, gigabytes, terabytes_per_second, tera_flops):
    device = device_of(name)
    assert device is DEVICES[name]
    assert 0.9 * gigabytes * GIB < device.memory_bytes <= gigabytes * GIB
    assert device.rates.bytes_per_second == pytest.approx(terabytes_per_second * 1e12)
    assert device.rates.flops(2) == device.rates.flops(1) == pytest.approx(tera_flops * 1e12)
    assert device.rates.flops(4) == device.rates.flops_32 < device.rates.flops_16 / 1.9


def test_there_are_the_devices_that_are_promised_with_caches_of_plausible_size():
    assert set(DEVICES) == {"h100", "h200", "a100-40", "a100-80", "l4", "rtx4090"}
    assert {device.rates.l2_bytes >> 20 for device in DEVICES.values()} == {40, 48, 50, 72}


def test_the_case_of_a_name_does_not_matter():
    assert device_of(" A100-80 ") is DEVICES["a100-80"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * GIB),
        ("24 GiB", 24 * GIB),
        ("24gib", 24 * GIB),
        ("0.5GiB", GIB // 2),
        ("80GB", 80 * 10**9),
        ("512MiB", 512 << 20),
        ("2TiB", 2 << 40),
        ("25769803776", 24 * GIB),
        ("25769803776B", 24 * GIB),
    ],
)
def test_a_device_may_be_so_many_bytes_of_which_the_rates_are_unknown(text, expected):
    device = device_of(text)
    assert (device.memory_bytes, device.rates) == (expected, None)


@pytest.mark.parametrize(
    "text", ["", "h300", "0", "-1GiB", "1KiB", "GiB", "24 gigs", "24IB", "1e9", "nan", "9" * 40, "٣GiB"]
)
def test_what_is_no_device_is_told_with_those_that_are(text):
    with pytest.raises(InvalidArgument, match=r"expected one of h100, h200.*such as 24GiB"):
        device_of(text)
