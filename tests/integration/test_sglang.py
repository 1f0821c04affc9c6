"""A real SGLang server, which computes on CPUs, follows a channel; see `make test-sglang`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from demo.processes import Child
from demo.run import free_port
from tests import sglang_server
from tests.integration.layouts import CASES
from tests.integration.vllm_server import (
    PATIENCE_S,
    Server,
    digests,
    one_thread,
    save_model,
    tells_of_wrong_bits,
)

pytestmark = pytest.mark.skipif(sglang_server.missing() is not None, reason=str(sglang_server.missing()))

TWO_RANKS = "--tp-size", "2"
A_CORE_EACH = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))}
PROMPT = list(range(5, 25))
START_S = 2 * PATIENCE_S


@contextlib.contextmanager
def serving(
    checkpoint: Path, channel: str | None, *arguments: str, **environ: str
) -> Iterator[tuple[Server, Child]]:
    """A server, once it answers; without a channel it follows nothing."""
    port = free_port()
    weights = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    server = Server(f"http://127.0.0.1:{port}", channel or "memory://none", weights)
    log = checkpoint.parent / f"sglang-{port}.log"
    with one_thread(), sglang_server.start(checkpoint, channel, port, log, *arguments, **environ) as child:
        child.wait_until(sglang_server.answers(port), START_S, "to start")
        yield server, child
        if server.publisher is not None:
            server.publisher.close()


def generate(
    server: Server, token_count: int = 12, prompt: list[int] = PROMPT, **fields: Any
) -> dict[str, Any]:
    sampling = {"max_new_tokens": token_count, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **fields}
    reply: dict[str, Any] = server.json("/generate", body)
    return reply


def refused(server: Server, path: str, body: object = None) -> tuple[int, str]:
    """Code and text of an error."""
    with pytest.raises(urllib.error.HTTPError) as error:
        server.json(path, body)
    with error.value as reply:
        return reply.code, reply.read().decode()


def made(reply: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Tokens and their log probabilities."""
    return reply["output_ids"], [logprob for logprob, *_ in reply["meta_info"]["output_token_logprobs"]]


def versions(reply: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    return [
        (int(span["version"]), span["start"], span["end"]) for span in reply["meta_info"]["weight_versions"]
    ]


def save_version(checkpoint: Path, server: Server, folder: Path) -> Path:
    """What `save_pretrained` of the trained model would save now."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    served = {name: tensor.to(torch.bfloat16) for name, tensor in server.weights.items()}
    save_file(served, folder / "model.safetensors", {"format": "pt"})
    return folder


def checksums(server: Server) -> list[dict[str, str]]:
    """SGLang's own checksums of all weights, on each rank."""
    return [rank["checksums"] for rank in server.json("/weights_checker", {"action": "checksum"})["ranks"]]


def logprobs_over(checkpoint: Path, by_version: Mapping[int, Path], reply: Mapping[str, Any]) -> list[float]:
    """The log probabilities of a reply's tokens where keys stay and weights change as its spans say, by
    transformers.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint), dtype=torch.float32)
    tokens, found, cache = reply["output_ids"], [], None
    fed = torch.tensor([PROMPT])
    with torch.no_grad():
        for version, start, end in versions(reply):
            state = {
                name: each.float()
                for name, each in load_file(by_version[version] / "model.safetensors").items()
            }
            model.load_state_dict(state)
            for at in range(start, end):
                out = model(input_ids=fed, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                found.append(float(out.logits[0, -1].log_softmax(-1)[tokens[at]]))
                fed = torch.tensor([[tokens[at]]])
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module")
def channel(checkpoint: Path) -> str:
    return f"file://{checkpoint.parent}/channel"


@pytest.fixture(scope="module")
def running(checkpoint: Path, channel: str) -> Iterator[tuple[Server, Child]]:
    with serving(checkpoint, channel, "--enable-metrics") as (server, child):
        yield server, child


@pytest.fixture
def server(running: tuple[Server, Child]) -> Server:
    found = running[0]
    if found.publisher is None:
        found.assert_serves(found.publish())
    return found


def test_nothing_is_answered_before_the_first_version(running: tuple[Server, Child]) -> None:
    server = running[0]
    assert server.publisher is None
    assert refused(server, "/generate", {"input_ids": PROMPT})[0] == 503
    assert refused(server, "/deltasync/ready")[0] == 503
    assert server.status()["version"] is None
    server.assert_serves(server.publish())
    assert server.json("/deltasync/sync", {})["version"] == 1
    assert generate(server)["meta_info"]["weight_version"] == "1"


def test_keys_of_older_weights_are_never_found(server: Server) -> None:
    first, again = generate(server), generate(server)
    assert again["meta_info"]["cached_tokens"] == len(PROMPT) - 1
    server.step(2e-2)
    server.assert_serves(server.publish())
    other, same = generate(server), generate(server)
    assert [each["meta_info"]["cached_tokens"] for each in (other, same)] == [0, len(PROMPT) - 1]
    assert made(other) != made(first)


def test_a_request_goes_on_over_commits_and_names_the_version_of_each_token(
    checkpoint: Path, server: Server, tmp_path: Path
) -> None:
    replies: list[dict[str, Any]] = []
    served = server.publish(step=1)
    saved = {served: save_version(checkpoint, server, tmp_path / str(served))}
    server.assert_serves(served)
    asking = threading.Thread(target=lambda: replies.append(generate(server, 600)))
    asking.start()
    time.sleep(0.3)
    while asking.is_alive() and len(saved) < 5:
        server.step(3e-2)
        served = server.publish()
        saved[served] = save_version(checkpoint, server, tmp_path / str(served))
        server.wait(lambda status: status["version"] == max(saved))
    asking.join(PATIENCE_S)
    (reply,) = replies
    spans = versions(reply)
    assert len(spans) > 1
    assert [version for version, _, _ in spans] == sorted({version for version, _, _ in spans})
    assert spans[0][1] == 0 and spans[-1][2] == 600
    assert all(end == start for (_, _, end), (_, start, _) in itertools.pairwise(spans))
    commits = server.status()["commits"]
    assert any(commit["running_requests"] for commit in commits)

    def error(spans: list[tuple[int, int, int]]) -> float:
        told = [{"version": version, "start": start, "end": end} for version, start, end in spans]
        expected = logprobs_over(checkpoint, saved, reply | {"meta_info": {"weight_versions": told}})
        return max(abs(a - b) for a, b in zip(made(reply)[1], expected, strict=True))

    told = error(spans)
    assert told < 0.2
    for by in (-1, 1):  # one token more or less for the first version
        (first, start, end), (second, _, end_2), *rest = spans
        assert error([(first, start, end + by), (second, end + by, end_2), *rest]) > 2 * told


def test_bits_that_were_not_published_are_rolled_back(server: Server) -> None:
    before = generate(server)
    weights = {name: tensor.clone() for name, tensor in server.weights.items()}
    served = server.status()["version"]
    server.step()
    status = server.publish_wrong_bits()
    assert tells_of_wrong_bits(status["error"])
    assert server.json("/deltasync/digest") == {"version": served, "sha256": digests(weights)}
    assert made(generate(server)) == made(before)
    server.publish_anchor()


def test_other_updates_of_weights_are_refused(checkpoint: Path, server: Server) -> None:
    for path, body in (
        ("/update_weights_from_disk", {"model_path": str(checkpoint)}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [], "load_format": None}),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
        ("/begin_weight_update", {}),
        ("/weights_checker", {"action": "reset_tensors"}),
    ):
        assert "this server follows it" in refused(server, path, body)[1]
    assert (
        refused(server, "/load_lora_adapter", {"lora_name": "other", "lora_path": str(checkpoint)})[0] == 400
    )
    served = server.status()["version"]
    before = made(generate(server))
    server.open("/flush_cache", {}).close()
    after = generate(server)
    assert (after["meta_info"]["cached_tokens"], made(after)) == (0, before)
    server.json("/update_weight_version", {"new_version": "mine", "abort_all_requests": False})
    assert generate(server)["meta_info"]["weight_version"] == str(served)
    server.assert_serves(served)


def test_a_pause_of_another_client_is_left_alone(server: Server) -> None:
    server.json("/pause_generation", {"mode": "in_place"})
    replies: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: replies.append(generate(server)))
    asking.start()
    server.step(2e-2)
    version = server.publish()
    server.assert_serves(version)
    time.sleep(0.5)
    assert not replies
    server.open("/continue_generation", {}).close()
    asking.join(PATIENCE_S)
    assert versions(replies[0]) == [(version, 0, 12)]
    assert replies[0]["meta_info"]["cached_tokens"] == 0


def test_released_weights_are_left_alone_and_audited_before_the_next_token(server: Server) -> None:
    served = server.status()["version"]
    server.open("/release_memory_occupation", {"tags": ["weights"]}).close()
    server.step()
    version = server.publish()
    status = server.wait(lambda status: status["state"] == "sleeping")
    assert status["version"] == served
    server.open("/resume_memory_occupation", {"tags": ["weights"]}).close()
    server.assert_serves(version)
    assert versions(generate(server)) == [(version, 0, 12)]


def test_a_request_is_made_by_the_version_that_it_demands(server: Server) -> None:
    live = server.status()["version"]
    assert {
        version for version, _, _ in versions(generate(server, **{"x-deltasync-version": str(live)}))
    } == {live}
    for stream in (False, True):
        body = {
            "input_ids": PROMPT,
            "stream": stream,
            "x-deltasync-version": live + 5,
            "x-deltasync-timeout": 0.2,
        }
        code, text = refused(server, "/generate", body)
        assert code == 409 and f"this server serves version {live}" in text
    server.step()
    newest = server.publish()
    (found,) = {
        version for version, _, _ in versions(generate(server, **{"x-deltasync-version": ">=latest"}))
    }
    assert found == newest
    code, _ = refused(server, "/generate", {"input_ids": PROMPT, "x-deltasync-version": live})
    assert code == 409


def test_metrics_are_beside_sglangs(server: Server) -> None:
    served = server.status()["version"]
    with server.open("/metrics/") as reply:
        text = reply.read().decode()
    assert re.search(rf"^deltasync_served_version(\{{.*\}})? {served}\.0$", text, re.MULTILINE)
    assert re.search(r"^deltasync_pause_seconds_count(\{.*\})? [1-9]", text, re.MULTILINE)
    assert "sglang:" in text


def test_pins(server: Server) -> None:
    newest = server.status()["version"]
    weights = {name: tensor.clone() for name, tensor in server.weights.items()}
    server.step()
    server.assert_serves(server.publish())
    assert server.json("/deltasync/pin", {"pin": str(newest)})["version"] == newest
    assert server.json("/deltasync/digest") == {"version": newest, "sha256": digests(weights)}
    assert refused(server, "/deltasync/pin", {"pin": "99999"})[0] == 409
    assert server.json("/deltasync/pin", {"pin": "newest"})["version"] == newest + 1
    assert refused(server, "/deltasync/sync", {"versoin": 1})[0] == 422


LAID_OUT = "deepseek_v2", "deepseek_v3_lora", "llama", "qwen3_moe", "gemma3"
"""Architectures of which each tensor changes alone; with those after them in `make test-sglang`."""
LIVED = "life:fp8", "life:w8a8_fp8"
"""Quantizations that SGLang makes of the checkpoint while it loads it."""
MORE = (
    *(
        "mixtral",
        "qwen2_moe",
        "phi3",
        "phi",
        "opt",
        "cohere",
        "qwen2",
        "olmo2",
        "granite",
        "stablelm",
        "starcoder2",
    ),
    *("gptj", "arcee", "qwen3", "glm4"),
)


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `sglang_layouts` says, in SGLang's environment."""
    folder, cases = (
        tmp_path_factory.mktemp("layouts"),
        [*LAID_OUT, *LIVED, *(MORE if "LONG_TESTS" in os.environ else ())],
    )
    for name in cases:
        case = CASES["qwen3" if name in LIVED else name]
        save_model(folder / name, case.config, **case.fields)
    command = [sglang_server.PYTHON, "-W", "ignore", "-m", "tests.integration.sglang_layouts", folder, *cases]
    environ = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=4 * START_S, check=False
    )
    lines = [
        json.loads(line.removeprefix("TOLD "))
        for line in done.stdout.splitlines()
        if line.startswith("TOLD ")
    ]
    assert [line["case"] for line in lines] == cases, done.stdout[-2000:] + done.stderr[-4000:]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", [*LAID_OUT, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
def test_each_tensor_alone_leads_where_a_fresh_load_does(
    case: str, laid_out: dict[str, dict[str, Any]]
) -> None:
    found = laid_out[case]
    assert (found["first"]["version"], found["second"]["version"]) == (1, 2)
    assert found["touched"] == found["differences"] == []
    assert found["alone"] == {}
    products = {f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("w_kc", "w_vc")}
    assert products <= {*found["changed"]} or not case.startswith("deepseek")


@pytest.mark.parametrize("case", LIVED)
def test_a_quantized_model_ends_where_a_fresh_load_does(
    case: str, laid_out: dict[str, dict[str, Any]]
) -> None:
    """After ten versions, damage, sleep, a twin that fails, and a version that is rolled back."""
    found = laid_out[case]
    moments = "ten versions", "damage", "sleep", "a twin that fails", "twins again", "a rollback"
    assert [found[each]["versions"] for each in moments] == [[each] * 2 for each in (10, 10, 10, 11, 12, 12)]
    assert all(found[each]["same"] and found[each]["differences"] == [] for each in moments)
    assert all((found[each]["made"], found[each]["twinned"]) == (16, 14) for each in moments)
    assert found["repaired"]
    *before, failing, again = (reload_s > 0 for reload_s in found["twins again"]["reload_s"])
    assert (any(before), failing, again) == (False, True, False)


def save_latent(folder: Path) -> Path:
    """A checkpoint of a small DeepSeek: latent attention, of which SGLang keeps products, and experts."""
    case = CASES["deepseek_v2"]
    return save_model(folder, case.config, **case.fields | {"q_lora_rank": 64})


@pytest.mark.slow
@pytest.mark.parametrize("save", [save_model, save_latent])
def test_ten_versions_compute_as_sglang_computes_with_their_checkpoints(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Tokens, log probabilities and SGLang's own checksums equal those of a server that loads each version
    from a disk.
    """
    checkpoint = save(tmp_path)
    replies, sums, saved = [], [], []
    with serving(checkpoint, f"file://{tmp_path}/channel") as (server, _):
        for number in range(1, 11):
            server.step(2e-4)
            server.assert_serves(server.publish(step=number))
            saved.append(save_version(checkpoint, server, tmp_path / str(number)))
            replies.append([generate(server, 32) for _ in range(2)])
            sums.append(checksums(server))
    with serving(saved[-1], None) as (fresh, _):
        assert checksums(fresh) == sums[-1]
        for number in (9, *range(9)):
            if number < 9:
                assert fresh.json("/update_weights_from_disk", {"model_path": str(saved[number])})["success"]
            assert [made(generate(fresh, 32)) for _ in range(2)] == [made(reply) for reply in replies[number]]
            assert checksums(fresh) == sums[number]
    assert len({str(made(reply)) for reply, _ in replies}) == 10


@pytest.mark.slow
def test_a_server_that_was_killed_serves_the_newest_version_again(tmp_path: Path) -> None:
    checkpoint, channel = save_model(tmp_path), f"file://{tmp_path}/channel"
    with serving(checkpoint, channel) as (server, child):
        for _ in range(2):
            server.step()
            server.assert_serves(server.publish())
        for pid in child.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        weights, publisher = server.weights, server.publisher
        server.step()
        server.publish()
        with serving(checkpoint, channel) as (again, _):
            again.weights, again.publisher = weights, publisher
            again.assert_serves(3)
            again.step()
            again.assert_serves(again.publish())
            reply = generate(again)
            assert versions(reply) == [(4, 0, 12)]


@pytest.mark.slow
def test_two_ranks_commit_in_the_same_step(tmp_path: Path) -> None:
    checkpoint, channel = save_model(tmp_path), f"file://{tmp_path}/channel"
    with serving(checkpoint, channel, *TWO_RANKS, **A_CORE_EACH) as (server, _):
        server.assert_serves(server.publish())
        replies: list[dict[str, Any]] = []
        asking = threading.Thread(target=lambda: replies.append(generate(server, 200)))
        asking.start()
        for _ in range(3):
            server.step(2e-3)
            server.assert_serves(server.publish())
        asking.join(PATIENCE_S)
        spans = versions(replies[0])
        assert spans[-1][2] == 200
        served = server.status()["version"]
        weights = {name: tensor.clone() for name, tensor in server.weights.items()}
        server.step()
        server.publish_wrong_bits()
        assert server.json("/deltasync/digest") == {"version": served, "sha256": digests(weights)}
        server.publish_anchor()
        reply, sums = made(generate(server, 32)), checksums(server)
        saved = save_version(checkpoint, server, tmp_path / "final")
    assert len(sums) == 2
    with serving(saved, None, *TWO_RANKS, **A_CORE_EACH) as (fresh, _):
        assert made(generate(fresh, 32)) == reply
        assert checksums(fresh) == sums


@pytest.mark.slow
def test_grpo_rolls_out_on_a_server_that_serves_each_step(tmp_path: Path) -> None:
    checkpoint, channel, root = save_model(tmp_path), f"file://{tmp_path}/channel", Path(__file__).parents[2]
    options = ["--max_steps", "3", "--max_completion_length", "16", "--output_dir", str(tmp_path / "out")]
    options += ["--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false", "--save_strategy", "no"]
    with serving(checkpoint, channel) as (server, _):
        command = [
            sys.executable,
            root / "examples" / "grpo_sglang.py",
            "--model",
            checkpoint,
            "--channel",
            channel,
        ]
        command += ["--server", server.url, *options]
        environ = {**os.environ, "PYTHONPATH": str(root), "TRL_EXPERIMENTAL_SILENCE": "1"}
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        status = server.wait(lambda status: status["version"] == 4)
    made_by = re.findall(r"step=(\d+) tokens_by_version=\{'(\d+)': \d+\}", done.stdout)
    assert made_by == [("0", "1"), ("1", "2"), ("2", "3")]
    assert status["error"] is None


def test_options_that_cannot_be_followed_are_refused_by_their_names() -> None:
    code = """
from unittest import mock
import msgspec
from sglang.srt.server_args import ServerArgs
from deltasync.errors import ConfigError
from sglang_plugin import refusals
defaults = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
class Options:
    def __init__(self, **others):
        self.__dict__ = defaults | others
with mock.patch("sglang.srt.arg_groups.overrides.resolving_view", lambda options: options):
    refusals.check(Options())
    for adapter, options in ("", {"enable_lora": True}), ("policy", {}), ("model", {"enable_lora": True}), (
        "policy", {"enable_lora": True, "max_loaded_loras": 8}
    ):
        with mock.patch.dict("os.environ", {"DELTASYNC_ADAPTER": adapter} if adapter else {}):
            try:
                refusals.check(Options(served_model_name="model", **options))
            except ConfigError as error:
                print("LoRA:", error)
    with mock.patch.dict("os.environ", DELTASYNC_ADAPTER="policy"):
        refusals.check(Options(enable_lora=True))
    rows = [(what, *option) for what, options in refusals.OPTIONS.items() for option in options.items()]
    for what, name, followed in rows:
        other = {bool: True, int: 2, str: "other", type(None): "other"}[type(followed)]
        try:
            refusals.check(Options(**{name: other}))
        except ConfigError as error:
            assert str(error).startswith(f"--{name.replace('_', '-')} {other} {what}"), error
            print(name)
    for name in (*refusals.QUANTIZATIONS, "awq"):
        try:
            refusals.check(Options(quantization=name))
        except ConfigError as error:
            print(error)
    import torch
    model = torch.nn.Linear(1, 1)
    refusals.check_model(model)
    model.use_intel_amx_backend = True
    try:
        refusals.check_model(model)
    except ConfigError as error:
        print(error)
    with mock.patch("sglang.__version__", "0.5.22"):
        try:
            refusals.check(Options())
        except ConfigError as error:
            print(error)
"""
    environ = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    command = [sglang_server.PYTHON, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    from sglang_plugin.refusals import OPTIONS

    expected = [name for options in OPTIONS.values() for name in options]
    *names, quantized, packed, version = done.stdout.strip().splitlines()[-len(expected) - 3 :]
    assert names == expected
    assert quantized.startswith("Weights that SGLang quantizes by awq were not run with deltasync")
    assert "for AMX" in packed
    said = [line.removeprefix("LoRA: ") for line in done.stdout.splitlines() if line.startswith("LoRA: ")]
    assert [sentence.split(" ")[0] for sentence in said] == [
        *("--enable-lora", "DELTASYNC_ADAPTER", "The", "--max-loaded-loras"),
    ]
    assert version.startswith("deltasync was run with SGLang 0.5.23, not with 0.5.22")


@pytest.mark.slow
def test_a_server_with_such_an_option_ends_with_the_sentence(checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with sglang_server.start(
        checkpoint, f"file://{tmp_path}", free_port(), log, "--enable-hierarchical-cache"
    ) as child:
        assert child.wait(START_S) != 0
    sentence = "--enable-hierarchical-cache True hands prompts keys that other weights computed"
    assert sentence in log.read_text()
