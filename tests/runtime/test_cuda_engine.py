"""A whole engine process on the fake driver: what its client is told when the device fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atlas.config import EngineConfig
from atlas.engine.client import EngineClient, EngineUnavailableError
from atlas.engine.messages import SamplingParams
from tests import tiny_model
from tests.runtime import fake_cuda


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def control(fake_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that makes the fake driver of the engine process fail."""
    for name, value in fake_cuda.environment(fake_driver, FAKE_CUDA_CONTROL=str(tmp_path / "control")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path / "control"


def drive(model: Path, kernels: Path, body: Callable[[EngineClient], Awaitable[None]]) -> int | None:
    """Run `body` with a client; the exit status of the engine process."""

    async def main() -> int | None:
        config = EngineConfig(
            model=str(model), backend="cuda", quant="bf16", kernel_packs=(str(kernels),), kv_memory_bytes=1 << 20
        )
        client = EngineClient(config)
        await client.start()
        try:
            await asyncio.wait_for(body(client), 30)
        finally:
            await client.shutdown()
        assert client._process is not None
        return client._process.returncode

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("fail", "leave_out", "expected"),
    [
        ("cuMemAlloc_v2=2", "", "Fake GPU 0: the arena needs 0.02 GiB, free are 1.00 GiB of 8.00 GiB"),
        ("cuLibraryLoadData=209", "", "it was compiled for another architecture than compute capability 9.0"),
        ("", "sample", "of op sample (kernel kernel_"),
        ("cuFuncLoad=2", "", "does not load: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        ("cuInit=803", "", "the kernel module and libcuda.so.1 are of different driver versions"),
        ("cuLaunchKernelEx=701", "", "failed with grid 1 x 1 x 1, block 32"),
    ],
)
def test_a_load_that_fails_ends_the_engine_with_the_reason(
    control: Path, tmp_path: Path, model: Path, fail: str, leave_out: str, expected: str
) -> None:
    kernels = fake_cuda.kernel_pack(model, tmp_path / "kernels.atlaspack", leave_out)
    control.write_text(fail)

    async def body(client: EngineClient) -> None:
        with pytest.raises(EngineUnavailableError) as error:
            await client.wait_ready()
        assert expected in str(error.value)
        await asyncio.wait_for(client._process.wait(), 10) if client._process else None

    assert drive(model, kernels, body) == 1


def test_a_device_that_is_lost_while_serving(control: Path, tmp_path: Path, model: Path) -> None:
    """The request ends with the reason, the client is dead, which is what /health tells, and the process fails."""
    kernels = fake_cuda.kernel_pack(model, tmp_path / "kernels.atlaspack")
    cause = "CUDA_ERROR_LAUNCH_FAILED (719): said by the fake driver"

    async def body(client: EngineClient) -> None:
        await client.wait_ready()
        control.with_suffix(".new").write_text("*@500=719")
        os.replace(control.with_suffix(".new"), control)
        tokens = 0
        with client.submit([1, 2, 3], SamplingParams(max_tokens=200)) as stream:
            async for output in stream:
                tokens += len(output.token_ids)
        assert 0 < tokens < 200
        assert output.finish_reason == "error"
        assert output.error is not None and cause in output.error
        assert client.state == "dead" and cause in client.reason
        await asyncio.wait_for(client._process.wait(), 10) if client._process else None

    assert drive(model, kernels, body) == 1
