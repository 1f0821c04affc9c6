"""Every command that a block of a page tells people to type is run by a test, or says why none runs it.

A block that has a language runs as written (`test_commands.py`, `test_walk.py`), or the page's source says
what it `needs`. Commands of deltasync in other blocks run here, on a channel that stands for `URL` and for
buckets. What neither runs is of a kind in `ELSEWHERE`; a command of no kind fails.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from deltasync import Publisher
from deltasync.ops.cli import main
from tests.docs.pages import PAGES, ROOT, Block, blocks
from tests.docs.printed import commands
from tests.docs.test_commands import WALK

PROGRAMS = "cat curl deltasync docker export grep helm hf kubectl make pip py-spy python serve sh tar vllm"
ELSEWHERE = {
    "make": "installs, measures or tests for minutes; tests/integration/test_make.py runs its first command",
    "tar": "unpacks the kit for a GPU on another machine; tests/integration/test_bench_gpu.py runs its parts",
    "python -m benchmarks": "measures for minutes; tests/unit/test_bench.py and its neighbours measure little",
    "python -m tests.simulator": "runs for minutes; tests/simulator/test_simulator.py runs a part",
    "python -m pytest": "is itself a test",
    "python deploy": "asks a service; tests/integration/test_deploy.py and test_router.py have stand-ins",
    "python examples/evaluate.py": "needs a server; tests/integration/one_server/test_vllm_routes.py has one",
    "python examples/demo": "takes minutes; tests/integration/test_vllm_demo.py runs it",
    "python -m demo.train": "needs a server elsewhere; examples/demo/supervisor.py starts it",
    "python -c": "makes that trainer's model; examples/demo/supervisor.py does so",
    "python -m wordle": "does not end; tests/integration/test_spaces.py starts it",
    "pip install": "changes the environment; tests/integration/test_wheel.py installs into one of its own",
    "kubectl": "needs a cluster; tests/unit/test_k8s.py checks the files",
    "helm": "needs a cluster; tests/unit/test_engines.py checks the values",
    "serve run": "needs a cluster; tests/integration/test_ray_serve.py has one",
    "docker": "needs Docker; tests/unit/test_compose.py checks the file",
    "vllm serve": "needs a model and a channel; tests/integration/vllm_server.py has both",
    "deltasync serve": "needs a model and a channel; tests/integration/vllm_server.py has both",
    "curl": "needs a server; tests/integration/one_server/test_vllm_routes.py has one",
    "deltasync follow http": "needs a server; tests/integration/one_server/test_vllm_routes.py has one",
    "deltasync check URL --against http": "needs a server; tests/integration/one_server has one",
    "deltasync blame file:///corpus": "shows a real run; docs/guides/history.md says which",
    "deltasync watch URL --page": "does not end; tests/integration/test_dashboard_page.py stops it",
    "deltasync watch URL  ": "does not end; tests/integration/test_progress.py stops it",
    "deltasync watch URL --json": "does not end; tests/integration/test_progress.py stops it",
    "hf auth": "needs an account",
    "py-spy": "is another project's program",
    "cat": "shows or joins files",
    "grep": "searches the sources",
    "export": "sets a variable for the commands after it",
}
"""Why a command is not run as it is printed, by its beginning, and what runs its like."""


def typed(block: Block) -> Iterator[str]:
    """The lines of a block that are typed, without assignments of variables."""
    for line in re.sub(r"\s*\\\n\s*", " ", block.text).splitlines():
        bare = re.sub(r"^\s*(\$ )?(\w+=\S+ )*", "", line)
        if bare.split(" ")[0] in PROGRAMS.split():
            yield bare


TYPED = [
    (block, line)
    for page in PAGES
    if page.name != "LOG.md"
    for block in blocks(page)
    if not block.is_shell and block.language != "python" and (block.page, block.section) != WALK
    for line in typed(block)
]
OURS = [
    pytest.param(words, id=f"{block.where}: {' '.join(words)}")
    for block, line in TYPED
    if not any(line.startswith(start) for start in ELSEWHERE)
    for words in commands(line)
    if words[0] == "deltasync"
]


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a channel of 41 versions, a copy of it, and a file of the newest version's weights."""
    folder = tmp_path_factory.mktemp("audit")
    weights = {"model.mlp.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}
    with Publisher(f"file://{folder}/run") as publisher:
        for step in range(41):
            weights["model.mlp.weight"][step % 8] += 1
            publisher.publish(weights.items()).wait(timeout_s=60)
    shutil.copytree(folder / "run", folder / "copy")
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("words", OURS)
def test_a_command_works_on_a_channel(
    words: tuple[str, ...], channel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(channel, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    stands_for = dict.fromkeys(("URL", "s3://bucket/run", "hf://buckets/me/runs/a"), f"file://{tmp_path}/run")
    stands_for |= {"COPY": f"file://{tmp_path}/copy", "URL...": f"file://{tmp_path}/third", "DIR": "out"}
    stands_for |= {"FILE|DIR|SERVER": "model.safetensors", "latest|VERSION|KEY": "latest"}
    before, repaired, after = " ".join(words[1:]).partition(" --from URL")
    text = f"{before} --from COPY{after}" if repaired else before
    done = CliRunner().invoke(main, [stands_for.get(word, word) for word in text.split()])
    assert done.exit_code == 0, done.output


def test_a_command_that_is_not_run_is_of_a_kind_that_says_why() -> None:
    ours = {block.where for block, line in TYPED if line.startswith("deltasync")}
    assert len(TYPED) > 100 and len(ours) > 20 and len(OURS) > 20
    assert [
        f"{block.where}: {line}" for block, line in TYPED if not line.startswith(("deltasync ", *ELSEWHERE))
    ] == []
    assert [start for start in ELSEWHERE if not any(line.startswith(start) for _, line in TYPED)] == []
    named = {path for why in ELSEWHERE.values() for path in re.findall(r"[a-z]+/[\w./]*\w", why)}
    assert [path for path in named if not (ROOT / path).exists()] == []
