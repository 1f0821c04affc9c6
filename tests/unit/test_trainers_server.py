"""Which servers a trainer may generate on, and compare its log probabilities with."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from deltasync import Publisher, open_store
from deltasync.errors import ConfigError
from tests import builders
from tests.answers import Answers, Asked
from trl_callback import server
from trl_callback.callback import client_class

MODEL = torch.nn.Linear(1, 1)
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
}


class Status(Answers):
    """A server whose /deltasync/status is what a test says: a document, or an HTTP status."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | int | bytes = {}
        self.models: list[str] = []
        self.asked = 0
        super().__init__(self._answer)

    def _answer(self, asked: Asked) -> tuple[int, Any]:
        if asked.path == "/v1/models":
            return 200, {"data": [{"id": name} for name in self.models]}
        assert asked.path.startswith("/deltasync/status")
        self.asked += 1
        answer = self.answer
        return (
            (answer, b"")
            if isinstance(answer, int)
            else (200, {"state": "serving"} | answer if isinstance(answer, dict) else answer)
        )


@pytest.fixture
def status() -> Iterator[Status]:
    with Status() as status:
        yield status


def check(
    status: Status, wait_s: float | None = None, model: torch.nn.Module = MODEL, **sampling: Any
) -> dict[str, Any] | None:
    given = SimpleNamespace(**(DEFAULTS | sampling))
    return server.check(given, model, status.url, compares=True, name="policy", wait_s=wait_s)


@pytest.mark.parametrize("answer", [{}, {"logprobs_mode": "raw_logprobs"}], ids=str)
@pytest.mark.parametrize(
    "neutral",
    [
        *({}, {"top_k": -1, "min_p": 0.0}, {"temperature": 1, "top_p": None, "top_k": None}),
        {"temperature": 0.5, "generation_kwargs": {"temperature": 1.0, "seed": 0, "max_tokens": 8}},
    ],
    ids=str,
)
def test_raw_ones_are_as_good_where_sampling_changes_nothing(
    status: Status, answer: Any, neutral: dict[str, Any]
) -> None:
    status.answer = answer
    assert check(status, **neutral)


CHANGING: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_p": 0.95},
    {"top_k": 20},
    {"min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"generation_kwargs": {"presence_penalty": 1.0}},
    {"vllm_structured_outputs_regex": "[0-9]+"},
]


@pytest.mark.parametrize("changing", CHANGING, ids=str)
def test_where_sampling_changes_them_the_server_must_say_that_they_are_processed(
    status: Status, changing: dict[str, Any]
) -> None:
    ((name, value),) = changing.items()
    said = f"{name}={value}" if name != "generation_kwargs" else "presence_penalty=1.0"
    for answer, told in [
        ({"logprobs_mode": "raw_logprobs"}, "gives raw_logprobs"),
        ({"state": "serving"}, "does not say which log probabilities it gives"),
    ]:
        status.answer = answer
        with pytest.raises(ConfigError) as refusal:
            check(status, **changing)
        sentence = str(refusal.value)
        assert sentence.startswith(f"The vLLM server at {status.url} {told}")
        assert f"as sampled with {said}:" in sentence
        assert sentence.endswith("--logprobs-mode processed_logprobs.")
    status.answer = {"logprobs_mode": "processed_logprobs"}
    assert check(status, **changing)


def test_a_server_that_ends_requests_is_refused(status: Status) -> None:
    status.answer = {"logprobs_mode": "processed_logprobs", "max_lag": 0}
    with pytest.raises(
        ConfigError, match=r"would take what there is of them for whole answers: .* DELTASYNC_MAX_LAG"
    ):
        check(status)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "something_new"])
def test_what_is_no_log_probability_is_refused_in_any_case(status: Status, mode: str) -> None:
    status.answer = {"logprobs_mode": mode}
    with pytest.raises(ConfigError, match=f"gives {mode}, .* --logprobs-mode processed_logprobs"):
        check(status)


def test_what_the_checkpoint_says_of_sampling_counts_where_the_trainer_says_nothing(status: Status) -> None:
    model = torch.nn.Linear(1, 1)
    model.generation_config = SimpleNamespace(min_p=0.05, temperature=0.6)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"with min_p=0\.05:"):
        check(status, model=model)
    assert check(status, model=model, min_p=0.0)


def test_a_server_that_is_not_up_is_asked_later_and_waited_for(status: Status) -> None:
    status.answer = 503
    assert not check(status)
    assert not check(status, temperature=0.7)
    later = threading.Timer(1.0, setattr, (status, "answer", {"logprobs_mode": "raw_logprobs"}))
    later.start()
    with pytest.raises(ConfigError, match="gives raw_logprobs"):
        check(status, wait_s=60.0, temperature=0.7)
    assert status.asked > 4


def test_a_server_that_never_answers_is_refused_after_a_while() -> None:
    gone = Status()
    gone.close()
    assert not check(gone, temperature=0.7)
    before = time.monotonic()
    with pytest.raises(ConfigError, match="does not answer GET /deltasync/status after 1 s"):
        check(gone, wait_s=1.0)
    assert time.monotonic() - before >= 1.0


@pytest.mark.parametrize("answer", [404, 401, b"no json"], ids=str)
@pytest.mark.parametrize("compares", [True, False])
def test_a_server_that_does_not_follow_a_channel_is_refused(
    status: Status, answer: Any, compares: bool
) -> None:
    status.answer = answer
    with pytest.raises(
        ConfigError, match=rf"server at {status.url} does not follow a channel, .*--worker-extension-cls"
    ):
        server.check(
            SimpleNamespace(**DEFAULTS), MODEL, status.url, compares=compares, name=None, wait_s=None
        )


def follows(status: Status, url: str, named: bool = False) -> dict[str, Any] | None:
    return server.check(
        SimpleNamespace(**DEFAULTS),
        MODEL,
        status.url,
        compares=False,
        name=None,
        wait_s=None,
        channel=open_store(url),
        named=[f"{status.url}/"] if named else [],
    )


def test_a_server_that_follows_another_run_is_refused_before_anything_is_published(
    status: Status, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/channel"
    status.answer = {"run_id": "other", "channel": "s3://b/wrong"}
    with pytest.raises(
        ConfigError,
        match=rf"follows run other of s3://b/wrong, and {url}, .* has no run yet.*CHANNEL={url}\.",
    ):
        follows(status, url)
    assert not (tmp_path / "channel").exists()
    with Publisher(url) as publisher:
        builders.publish(publisher, builders.weights())
        ours = publisher.run_id
    with pytest.raises(ConfigError, match=f"holds run {ours}"):
        follows(status, url, named=True)
    status.answer = {"run_id": ours, "channel": "file:///mirror"}  # a relay's copy
    assert follows(status, url)


def test_a_server_that_waits_at_another_url_is_refused(status: Status, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    (tmp_path / "link").symlink_to(tmp_path)
    for same in (url, f"{url}/", f"file://{tmp_path}/link/channel"):
        status.answer = {"state": "waiting", "channel": same}
        assert follows(status, url)
    status.answer = {"state": "waiting"}  # without the token it says no URL
    assert follows(status, url)
    status.answer = {"state": "waiting", "run_id": None, "channel": f"{url}-typo"}
    with pytest.raises(
        ConfigError, match=rf"follows {url}-typo, which holds no version yet, .*replicas=\[\"{status.url}"
    ):
        follows(status, url)
    assert follows(status, url, named=True)


def test_a_server_of_a_model_by_another_name_is_refused(status: Status) -> None:
    status.models = ["tiny"]
    with pytest.raises(ConfigError, match="serves the model tiny, and the trainer asks for policy"):
        check(status)
    status.models = ["tiny", "policy"]
    assert check(status)


def test_a_server_of_an_adapter_is_for_a_trainer_that_publishes_its_own_alone(status: Status) -> None:
    def check(adapter_only: bool, **lora: Any) -> dict[str, Any] | None:
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model = peft.get_peft_model(layers, peft.LoraConfig(target_modules=["0"], **lora))
        arguments: dict[str, Any] = {"compares": False, "name": "model", "wait_s": None}
        return server.check(
            SimpleNamespace(**DEFAULTS), model, status.url, adapter_only=adapter_only, **arguments
        )

    status.models = ["model"]
    with pytest.raises(
        ConfigError, match=r"loads none: it follows full weights\. Start it .* --adapter NAME"
    ):
        check(True)
    status.answer = {"state": "refused", "error": "vLLM was started without --enable-lora."}
    with pytest.raises(ConfigError, match=r"loads none: vLLM was started without --enable-lora\."):
        check(True)
    status.answer = {"adapters": ["policy", "policy-v3"]}
    found = check(True)
    assert found is not None and found["adapters"][0] == "policy"
    with pytest.raises(ConfigError, match="as the adapter policy, and this trainer publishes full weights"):
        check(False)
    said = r"no adapter with use_dora=True and modules_to_save=\['1'\], so the server at .* adapter_only out"
    with pytest.raises(ConfigError, match=said):
        check(True, use_dora=True, modules_to_save=["1"])
    for refused in ({"bias": "lora_only"}, {"init_lora_weights": "pissa_niter_2"}):
        with pytest.raises(ConfigError, match=f"no adapter with {next(iter(refused))}="):
            check(True, **refused)
    assert check(True, init_lora_weights="gaussian")


@pytest.mark.parametrize(
    ("limits", "lora", "said"),
    [
        ({}, {"r": 64}, None),  # a server of an earlier build
        ({"max_lora_rank": 16}, {"r": 16, "rank_pattern": {"up": 8}}, None),
        (
            {"max_lora_rank": 16},
            {"r": 24},
            "rank 24, .* above 16: start it with a --max-lora-rank of at least 24",
        ),
        ({"max_lora_rank": 16}, {"r": 8, "rank_pattern": {"up": 32}}, "has rank 32, .* with r=16"),
        ({"lora_target_modules": ["up", "0.down"]}, {}, None),
        ({"lora_target_modules": ["fused"]}, {}, None),  # of which layers only the server can tell
        ({"lora_target_modules": ["up"]}, {}, "changes down, .*--lora-target-modules up: start it without"),
    ],
    ids=str,
)
def test_an_adapter_that_the_servers_options_exclude_is_refused(
    status: Status, limits: dict[str, Any], lora: dict[str, Any], said: str | None
) -> None:
    layers = torch.nn.ModuleDict({"up": torch.nn.Linear(2, 2), "down": torch.nn.Linear(2, 2)})
    model = peft.get_peft_model(
        torch.nn.Sequential(layers), peft.LoraConfig(target_modules=["up", "down"], **lora)
    )
    status.answer = {"adapters": ["policy"], **limits}
    arguments: dict[str, Any] = {"compares": False, "name": None, "wait_s": None, "adapter_only": True}
    with contextlib.nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        server.check(SimpleNamespace(**DEFAULTS), model, status.url, **arguments)


def test_a_trainer_on_policy_demands_the_version_that_it_has_pushed() -> None:
    """A server that started anew would answer with the weights of its checkpoint."""

    class Client:
        session, base_url = SimpleNamespace(headers={}), "http://127.0.0.1:1"

    calls: list[str] = []
    steps = {
        name: lambda *_, name=name: calls.append(name)
        for name in ("init_weight_transfer", "send_weights", "resume")
    }
    config = SimpleNamespace(adapter_only=True)
    transfer: Any = SimpleNamespace(**steps, publisher=SimpleNamespace(version=7), config=config)
    client = client_class(transfer, lambda url: {"adapters": ["policy", "policy-v6"]}, Client)()
    client.init_communicator()
    assert (client.model, transfer.server_url) == ("policy", Client.base_url)
    client.update_named_params([], iter(()))
    assert calls == ["init_weight_transfer", "send_weights", "resume"]
    assert client.session.headers == {"x-deltasync-version": ">=7"}
