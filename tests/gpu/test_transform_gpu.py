"""Transforms on a device are bit-identical to the CPU's reference, for every format."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.support import transform_suite  # noqa: E402

from penstock.transform import fuse, quantize  # noqa: E402
from penstock.transform.formats import FORMATS, format_of  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("tag", sorted(FORMATS))
def test_kernels_are_bit_identical_to_reference(tag: str) -> None:
    shapes = (*transform_suite.SMALL, *transform_suite.LARGE)
    assert transform_suite.check_kernels(FORMATS[tag], DEVICE, shapes) >= 20


@pytest.mark.parametrize("tag", ["fp8-block128", "mxfp8", "mxfp8-floor", "nvfp4"])
def test_software_rounding_matches_hardware_rounding(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "NATIVE", (99, 0))
    transform_suite.check_kernels(FORMATS[tag], DEVICE)


@pytest.mark.parametrize("tag", sorted(FORMATS))
def test_reference_quantisation_is_identical_on_cpu_and_gpu(tag: str) -> None:
    form = FORMATS[tag]
    for source in transform_suite.sources(form, transform_suite.SMALL):
        here, there = quantize.quantise(form, source), quantize.quantise(form, source.to(DEVICE))
        for a, b in zip(here, there, strict=True):
            same = a.reshape(-1).contiguous().view(torch.uint8) == b.cpu().reshape(-1).contiguous().view(torch.uint8)
            assert same.all()


def test_small_tensors_share_kernel_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    form = format_of("fp8-block128")
    data = torch.randn(2000, 40, 176, device=DEVICE).bfloat16()
    codes = torch.empty(data.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.empty(2000, 1, 2, device=DEVICE)
    jobs = [fuse.KernelJob(source=data[i], outputs=(codes[i], scales[i])) for i in range(2000)]
    fusion = fuse.fuse(form, jobs)
    assert len(fusion.groups) == 1
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fusion.run()
    stream.synchronize()
    expected = quantize.quantise(form, data.cpu())
    assert np.array_equal(codes.cpu().view(torch.uint8), expected[0].view(torch.uint8))
    assert np.array_equal(scales.cpu(), expected[1])
