"""One logger for all of the plugin, under vLLM's own, whose handlers and level it shares."""

from deltasync.errors import get_logger

logger = get_logger("vllm.vllm_plugin")
