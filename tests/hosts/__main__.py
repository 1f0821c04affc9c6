"""The demo apart: trainer, two vLLM servers, environment and bucket on hosts of their own (`python -m
tests.hosts`).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from benchmarks.common import document
from deltasync.errors import DeltaSyncError
from demo.model import build_checkpoint
from tests.hosts import network, summary
from tests.hosts.network import ROOT
from tests.hosts.run import RunSettings, run
from tests.hosts.services import STORES, why_not_runnable

_began_s = time.monotonic()


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"[{time.monotonic() - _began_s:6.1f} s] {text}", file=sys.stderr, flush=True)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument(
        "--store",
        choices=(*STORES, "both"),
        default="both",
        help="S3 (RADOS gateway), HF (local Hub), or both",
    )
    parser.add_argument("--shape", action="store_true", help="lines of 50 ms there and back, 100 Mbit/s each")
    parser.add_argument("--versions", type=int, default=50, help="versions to publish (default: 50)")
    parser.add_argument(
        "--replicas", type=int, default=2, help="beyond 2 they are in host memory, and join at half time"
    )
    parser.add_argument(
        "--regions",
        action="store_true",
        help="a relay in the region of those in host memory, which follow its copy",
    )
    parser.add_argument(
        "--task",
        choices=("counting", "wordle"),
        default="wordle",
        help="what the model learns (default: wordle)",
    )
    parser.add_argument(
        "--loopback", action="store_true", help="no namespaces: all on this host, told apart by ports"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-hosts-out"),
        help="earlier runs in it are kept and compared with",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the tables of all runs in --out as a result file instead"
    )
    return parser.parse_args()


def main() -> int:
    """Run, print, and tell by the exit code whether all bars are met."""
    args = parse_args()
    sys.path.append(str(ROOT / "examples"))  # Wordle
    for ending in (signal.SIGINT, signal.SIGTERM):  # a shell may have started us with SIGINT ignored
        signal.signal(ending, _interrupt)
    refusal = "--loopback was given" if args.loopback else network.why_not_permitted()
    if refusal is not None:
        say(
            f"no network namespaces: {refusal}. All hosts are this one, told apart by ports: no firewall, no "
            "counters"
        )
        if args.shape:
            say("without namespaces no line can be shaped")
            return 2
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.out / f"model-{args.task}"
    if not (model / "config.json").exists():
        say("building a tiny Qwen3 and warming it up by supervised learning")
        build_checkpoint(model, 0, task=args.task)
    for store in STORES if args.store == "both" else [args.store]:
        missing = why_not_runnable(store)
        if missing is not None:
            say(f"skipped {store}: {missing}")
            continue
        name = store + ("" if args.replicas == 2 else f"-{args.replicas}")
        name += ("-regions" if args.regions else "") + ("-shaped" if args.shape else "")
        settings = RunSettings(
            folder=args.out / name,
            model=model,
            store=store,
            task=args.task,
            versions=args.versions,
            replicas=args.replicas,
            regions=args.regions,
            shape=network.Shape() if args.shape else None,
            refusal=refusal,
        )
        say(f"{name}: {args.versions} versions, {args.task}")
        found = run(settings, say)
        if not args.json:
            print(f"\n{name}")
            _print_rows(summary.table(found))
    return _verdict(args.out, args.versions, args.json)


def _interrupt(*_: object) -> None:
    """End once; what comes then is not to be interrupted by an impatient second Ctrl-C."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt


def _verdict(out: Path, versions: int, as_json: bool) -> int:
    runs = {path.parent.name: json.loads(path.read_text()) for path in sorted(out.glob("*/summary.json"))}
    bars = summary.bars(runs, versions)
    (out / "summary.json").write_text(json.dumps({"runs": runs, "bars": bars}, indent=2) + "\n")
    if as_json:
        tables = {name: dict(summary.table(run)) for name, run in runs.items()}
        rows = [
            [what, *(table.get(what, "") for table in tables.values())]
            for what in next(iter(tables.values()), {})
        ]
        print(json.dumps(document({"columns": ["", *tables], "rows": rows}), indent=2))
        return 0 if tables else 1
    print("\nbars")
    _print_rows([(name, f"{'met   ' if met else 'MISSED'}  {text}") for name, text, met in bars])
    return 0 if bars and all(met for _, _, met in bars) else 1


def _print_rows(rows: list[tuple[str, str]]) -> None:
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DeltaSyncError, RuntimeError) as error:
        say(str(error))
        sys.exit(3)
    except KeyboardInterrupt:
        say("interrupted; everything is ended and removed")
        sys.exit(130)
