"""How vLLM lays out models of many architectures: each is recorded, proven, and brought from one version to
the next.

In a process of its own (`vllm_layouts`): vLLM for the CPU wants to be imported first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.integration import kernels
from tests.integration.vllm_server import PATIENCE_S

pytestmark = pytest.mark.vllm

ALIEN = "vLLM keeps it in a layout of its own"
CHANGED = "vLLM holds its layer in another dtype or shape, quantized for example"
IN_PLACE = ["llama", "gemma2", "gemma3", "phi3", "idefics3", "glm4_moe", "glm4_moe_mtp", "qwen3_moe_loaded"]
IN_PLACE += ["fp8_blocks"]  # bytes and scales, as the trainer has them
# Of those that are not patched in place: how many tensors have twins, and why.
TWINNED = {
    "qwen3_moe": {ALIEN: 24},
    # w2 is as it was loaded, but the layer is loaded as a whole.
    "qwen3_moe_swapped": {ALIEN: 16, "others of its layer are loaded again": 8},
    "deepseek_v2": {ALIEN: 12},
    "qwen3_next": {ALIEN: 24, "vLLM holds it as float32": 2, "others of its layer are loaded again": 2}
    | ({CHANGED: 2} if torch.cpu._is_avx512_bf16_supported() else {}),  # the convolution's, packed
    "fp8": {CHANGED: 14},
    "fp8_lora": {CHANGED: 14},
    "awq": {CHANGED: 42},
    "gptq": {CHANGED: 42},  # its method has no use for `qzeros`, which are loaded
    "float8": {CHANGED: 24, ALIEN: 2, "others of its layer are loaded again": 2},
    "glm4_moe_mtp_packed": {ALIEN: 24, "others of its layer are loaded again": 2},
}
LIVED = tuple(
    f"life:{case}" for case in ("fp8", "qwen3_moe", "deepseek_v2", "qwen3_next", "awq", "float8", "fp8_lora")
)
REFUSED = {
    "int8": "scheme.kernel.dnnl_handler[0], which has weights where nothing can prove them",
    "tied_gemma": "There is no module or parameter named 'lm_head'",
    "gpt_oss": "having it load them again does not change GptOssRoutedExperts, so this model cannot be updated",
    "deepseek_v2_fp8": "vLLM computed W_UK_T, W_UV of MLAAttention from weights of other layers, and would not do so again",
}

# Of these each tensor changes alone as well. On CPUs with AVX-512 BF16 vLLM packs the weights of a
# convolution, and keeps those that it loaded in Mamba2's mixer beside them: such a model is refused.
MAY_BE_REFUSED = ("falcon_h1", "mamba2", "nemotron_h", "granite_hybrid")
TIED = ("tied", "tied_again")
SWEPT = (
    *(
        *TIED,
        "phi",
        "mamba",
        "jamba",
        "falcon",
        *MAY_BE_REFUSED,
        "glm4_moe_alone",
        "deepseek_v3",
        "mixtral",
        "minimax",
    ),
    *(
        "qwen2_moe",
        "olmoe",
        "granite_moe",
        "gpt2",
        "gptj",
        "opt",
        "cohere",
        "persimmon",
        "qwen2",
        "olmo2",
        "granite",
    ),
    *(
        "gptneox",
        "stablelm",
        "starcoder2",
        "exaone4",
        "nemotron",
        "smollm3",
        "apertus",
        "arcee",
        "qwen3",
        "glm",
        "glm4",
    ),
    *("ernie4_5", "seedoss", "hunyuandensev1"),
)

KERNELS = kernels.cases()

# Each is laid out, or refused, as another one here is.
SLOW = (
    *KERNELS.keys()
    - {
        "kernel:nvfp4_modelopt:experts:cutlass",
        "kernel:nvfp4:MarlinNvFp4LinearKernel",
        "kernel:mxfp8:FlashInferCutlassMxfp8LinearKernel",
    },
    *(case for case in SWEPT if case not in ("tied", "phi", "mamba")),
    # llama, qwen3_moe_swapped and mamba stand for the first three.
    *(*LIVED[1:], "fp8_lora", "awq", "gptq", "int8", "float8", "glm4_moe_mtp_packed"),
    *("phi", "phi3", "qwen3_moe", "gemma2", "gemma3", "qwen3_moe_loaded", "deepseek_v2_fp8", "tied_gemma"),
)


def marked(*cases: str) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in cases]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = [
        case
        for case in (*TWINNED, "quantizers", *LIVED, *IN_PLACE, *REFUSED, *SWEPT, "kernels", *KERNELS)
        if "LONG_TESTS" in os.environ or case not in SLOW
    ]
    command = [
        sys.executable,
        "-m",
        "tests.integration.vllm_layouts",
        str(tmp_path_factory.mktemp("layouts")),
        *cases,
    ]
    environ = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        env=environ,
        capture_output=True,
        text=True,
        timeout=(20 if "LONG_TESTS" in os.environ else 4) * PATIENCE_S,
        check=False,
    )
    lines = [
        json.loads(line.removeprefix("TOLD "))
        for line in done.stdout.splitlines()
        if line.startswith("TOLD ")
    ]
    assert [line["case"] for line in lines] == cases, done.stdout[-2000:] + done.stderr[-4000:]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", marked(*IN_PLACE, *TWINNED))
def test_a_commit_leaves_every_tensor_as_vllm_would_have_loaded_it(
    case: str, told: dict[str, dict[str, Any]]
) -> None:
    found = told[case]
    assert (found["first"]["state"], found["first"]["version"], found["first"]["commits"]) == (
        "serving",
        1,
        [],
    )
    assert found["touched"] == []
    assert (found["second"]["state"], found["second"]["version"]) == ("serving", 2)
    assert found["differences"] == []
    assert len(found["changed"]) >= 15


def test_a_model_that_sees_is_patched_with_its_tower(told: dict[str, dict[str, Any]]) -> None:
    parts = ["text_model.layers.1.self_attn.qkv_proj", "vision_model.encoder.layers.1.self_attn.qkv_proj"]
    parts += ["vision_model.embeddings.patch_embedding", "connector.modality_projection.proj"]
    assert {f"model.{part}.weight" for part in parts} <= set(told["idefics3"]["changed"])


def test_a_router_in_float32_is_patched_beside_matrices_in_bfloat16(told: dict[str, dict[str, Any]]) -> None:
    assert {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"} <= set(
        told["glm4_moe"]["changed"]
    )


def test_a_layer_that_drafts_is_patched_with_the_model_but_for_what_it_shares(
    told: dict[str, dict[str, Any]],
) -> None:
    found = told["glm4_moe_mtp"]
    assert found["second"]["draft"] == "Glm4MoeMTP, which drafts tokens, is followed as a part of the model."
    assert {"1.model.layers.2.eh_proj.weight", "1.model.layers.2.mtp_block.self_attn.qkv_proj.weight"} <= {
        *found["changed"]
    }
    shared = ["model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"]
    assert sorted(found["second"]["ignored"]) == shared


@pytest.mark.parametrize("case", marked(*IN_PLACE, *TWINNED))
def test_the_target_says_which_tensors_have_twins_and_why(case: str, told: dict[str, dict[str, Any]]) -> None:
    status = told[case]["second"]
    expected = TWINNED.get(case, {})
    assert {why: len(names) for why, names in status["twinned"]} == expected
    assert all(name.startswith("model.layers.") for _, names in status["twinned"] for name in names)
    assert status["patched_tensors"] > 0
    assert status["reloaded"] == []
    assert status["commits"][0]["reload_s"] == 0


@pytest.mark.parametrize("case", marked(*LIVED))
def test_versions_a_rollback_damage_sleep_and_failing_twins_end_where_a_fresh_server_begins(
    case: str, told: dict[str, dict[str, Any]]
) -> None:
    found = told[case]
    moments = "ten versions", "damage", "sleep", "a twin that fails", "twins again", "a rollback"
    assert [found[each]["versions"] for each in moments] == [[each] * 2 for each in (11, 11, 11, 12, 13, 13)]
    assert all(found[each]["same"] and found[each]["made"] for each in moments)
    assert found["repaired"]
    if case == "life:fp8":  # of 8 layers; every third version changes little, and needs no twin
        assert found["twins"] == [8 if number % 3 else 0 for number in range(10)]
        assert found["remark"] is None
    *before, failing, again = (reload_s > 0 for reload_s in found["twins again"]["reload_s"])
    assert (any(before), failing, again) == (False, True, False)


def test_vllm_quantizes_elements_as_it_does_whole_weights(told: dict[str, dict[str, Any]]) -> None:
    proven = told["quantizers"]["proven"]
    assert len(proven) == 6 and all(proven.values()), proven


@pytest.mark.parametrize("case", marked(*KERNELS))
def test_layouts_of_kernels_for_gpus_end_where_a_fresh_load_begins(
    case: str, told: dict[str, dict[str, Any]]
) -> None:
    found, how = told[case], KERNELS[case][0].how
    if how == "refused":
        assert "does not change" in found["second"]["error"]
        assert found["differences"] == found["changed"] != []
        return
    assert (found["first"]["version"], found["second"]["version"]) == (1, 2), found["second"]["error"]
    assert (found["touched"], found["differences"], found["second"]["reloaded"]) == ([], [], [])
    assert len(found["changed"]) >= 15
    assert bool(found["second"]["twinned"]) == (how == "twins")


def test_each_kernel_for_cuda_is_run_or_named_as_one_that_needs_a_gpu(
    told: dict[str, dict[str, Any]],
) -> None:
    run = {name for each in kernels.KERNELS for name in each.linear}
    read = {name for names in kernels.NEEDS_A_GPU.values() for name in names}
    assert {*told["kernels"]["for_cuda"]} - kernels.NEWER == run | read
    assert not run & read


@pytest.mark.parametrize("case", marked(*REFUSED))
def test_what_can_be_neither_patched_nor_loaded_again_is_refused_and_untouched(
    case: str, told: dict[str, dict[str, Any]]
) -> None:
    found = told[case]
    for status in (found["first"], found["second"]):
        assert (status["state"], status["version"]) == ("failed", None)
        assert REFUSED[case] in status["error"]
    assert found["touched"] == []
    assert found["differences"] == found["changed"] != []


@pytest.mark.parametrize("case", marked(*TIED))
def test_a_version_in_which_tensors_differ_that_are_one_is_refused(
    case: str, told: dict[str, dict[str, Any]]
) -> None:
    served = {version for _, version in told[case]["untied"]}
    assert len(served) == 1 and len(told[case]["untied"]) == 2
    for error, _ in told[case]["untied"]:
        assert (
            "lm_head.weight and model.embed_tokens.weight are one tensor in the model, and differ in version"
            in error
        )


@pytest.mark.parametrize("case", marked(*SWEPT))
def test_each_tensor_alone_leads_where_a_fresh_load_does(case: str, told: dict[str, dict[str, Any]]) -> None:
    found = told[case]
    assert found["touched"] == []
    if case in MAY_BE_REFUSED and found["second"]["version"] is None:
        assert "does not change MambaMixer2.conv_weights" in found["second"]["error"]
        return
    assert (found["first"]["version"], found["second"]["version"]) == (1, 2)
    assert found["differences"] == []
    assert found["alone"] == {}
    if case == "deepseek_v3":
        assert found["second"]["reloaded"] == []
