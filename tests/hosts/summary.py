"""What a run found out: the numbers, the bars, and both as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from demo import report
from tests.hosts.firewall import counter_name
from tests.hosts.network import HOSTS, REPLICAS, Shape

WINDOW = 5  # steps that the first and the last reward are means of
PAUSE_WITHIN = 1.2  # of the run that is not shaped
LAG_S = {"p50": 0.35, "p95": 0.60}  # by S3, over lines of 50 ms and 100 Mbit/s
TRAINER_WAITS_S = 0.1  # for a version, mean
FAR_WITHIN = 1.25  # bytes over the line to a region with a relay per byte that was published
UPLOAD_WITHIN = 1.1  # bytes per byte of payload, with the whole fleet and with the vLLM servers alone


def summarize(
    folder: Path,
    *,
    statuses: dict[str, dict[str, Any]],
    proofs: dict[str, list[dict[str, Any]]],
    channel: dict[int, dict[str, str]],
    counters: dict[str, dict[str, dict[str, int]]],
    uploads: dict[int, int],
    joined_at: int | None,
    shape: Shape | None,
    checks: dict[str, Any],
) -> dict[str, Any]:
    """The numbers of `summary.json`.

    Args:
        folder: With `metrics.jsonl` and `published.jsonl`.
        statuses: Last status of each vLLM server.
        proofs: Digests of its live memory.
        channel: sha256 by version and tensor, of the channel.
        counters: See `firewall`.
        uploads: Bytes from trainer to bucket when a version was out.
        joined_at: The version that was out when the replicas in host memory joined.
        shape: Delay and rate of the lines.
        checks: Taken over as they are.
    """
    published = list(report.read_lines(folder / "published.jsonl"))
    rewards = [
        line["reward"] for line in report.read_lines(folder / "metrics.jsonl") if line["reward"] is not None
    ]
    commits = {host: statuses[host]["commits"] for host in REPLICAS}
    everything = [commit for host in REPLICAS for commit in commits[host]]
    deltas = published[1:]
    trained = {line["version"]: line["sha256"] for line in published}
    pauses_ms = [1e3 * commit["pause_s"] for commit in everything]
    lags_s = [commit["lag_s"] for commit in everything if commit["lag_s"] is not None]
    return checks | {
        "versions_published": len(published),
        "versions_committed": {host: len(commits[host]) for host in REPLICAS},
        "bits_checked_at": {host: sorted({proof["version"] for proof in proofs[host]}) for host in REPLICAS},
        "bit_exact": bit_exact(proofs, channel, trained),
        "payload_bytes_mean": _mean([line["payload_bytes"] for line in deltas]),
        "changed_fraction_mean": _mean([line["changed_fraction"] for line in deltas]),
        "encode_s_mean": _mean([line["encode_s"] for line in deltas]),
        "ack_s_mean": _mean([line["ack_s"] for line in deltas]),
        "stage_s_p50": _percentile([commit["stage_s"] for commit in everything], 50),
        "pause_ms_p50": _percentile(pauses_ms, 50),
        "pause_ms_p95": _percentile(pauses_ms, 95),
        "lag_s_p50": _percentile(lags_s, 50),
        "lag_s_p95": _percentile(lags_s, 95),
        "shaped": shape is not None,
        "reward_first": _mean(rewards[:WINDOW]),
        "reward_last": _mean(rewards[-WINDOW:]),
        "bytes": {host: _by_peer(counters[host], "to") for host in counters},
        "refused_packets": {host: _total(counters[host], "refused_") for host in counters},
        "stray_packets": {host: _total(counters[host], "stray_") for host in counters},
        "opened_by_vllm": _opened_by_vllm(counters),
        "upload": _upload(published, uploads, joined_at),
        "far": _far(published, counters),
    }


def bit_exact(
    proofs: dict[str, list[dict[str, Any]]],
    channel: dict[int, dict[str, str]],
    trained: dict[int, dict[str, str]],
) -> bool:
    """Whether live memory, the channel and what the trainer's optimizer made are the same, the last version
    included.
    """
    last = max(trained)
    return all(
        host_proofs[-1]["version"] == last
        and all(
            proof["sha256"] == trained[proof["version"]] == channel[proof["version"]] for proof in host_proofs
        )
        for host_proofs in proofs.values()
    )


def _by_peer(counters: dict[str, dict[str, int]], way: str) -> dict[str, int]:
    found = {host: counters.get(f"{way}_{counter_name(host)}", {}).get("bytes", 0) for host in HOSTS}
    return {host: count for host, count in found.items() if count}


def _total(counters: dict[str, dict[str, int]], kind: str) -> int:
    return sum(counter["packets"] for name, counter in counters.items() if name.startswith(kind))


def _opened_by_vllm(counters: dict[str, dict[str, dict[str, int]]]) -> dict[str, int]:
    """Bytes of packets by which a vLLM host would have opened a connection to the trainer, sent or received;
    none passed.
    """
    found = {}
    for host in REPLICAS:
        if host in counters:
            sent = counters[host]["refused_to_trainer"]["bytes"]
            found[host] = sent + counters["trainer"][f"refused_from_{counter_name(host)}"]["bytes"]
    return found


def _upload(
    published: list[dict[str, Any]], uploads: dict[int, int], joined_at: int | None
) -> dict[str, Any]:
    """Bytes from trainer to bucket per byte of payload, before and after the others joined."""
    found: dict[str, Any] = {}
    versions = sorted(uploads)
    if len(versions) < 2:
        return found
    payload = {line["version"]: line["payload_bytes"] + line["anchor_bytes"] for line in published}
    border = versions[-1] if joined_at is None else joined_at
    for name, first, last in (("alone", versions[0], border), ("with_fleet", border, versions[-1])):
        stored = sum(count for version, count in payload.items() if first < version <= last)
        if stored:
            sent = uploads[last] - uploads[first]
            found[name] = {
                "versions": last - first,
                "bytes": sent,
                "payload_bytes": stored,
                "ratio": round(sent / stored, 4),
            }
    return found


def _far(published: list[dict[str, Any]], counters: dict[str, dict[str, dict[str, int]]]) -> dict[str, Any]:
    """Bytes from the bucket to the fleet's host per byte that was published."""
    if "bucket" not in counters:
        return {}
    sent = counters["bucket"][f"to_{counter_name('fleet')}"]["bytes"]
    stored = sum(line["payload_bytes"] + line["anchor_bytes"] for line in published)
    return {"bytes": sent, "published_bytes": stored, "ratio": round(sent / stored, 4)}


def _mean(values: list[float]) -> float:
    return round(float(np.mean(values)), 6) if values else 0.0


def _percentile(values: list[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 4) if values else 0.0


def bars(runs: dict[str, dict[str, Any]], versions: int) -> list[tuple[str, str, bool]]:
    """Each run held to its bars: which, what was found, whether it is met."""
    found = []
    for name, run in runs.items():
        published = run["versions_published"]
        found.append((f"{name}: at least {versions} versions", str(published), published >= versions))
        counts = " and ".join(f"{len(each)}" for each in run["bits_checked_at"].values())
        found.append(
            (
                f"{name}: bits of both replicas, channel and trainer equal",
                f"at {counts} versions",
                run["bit_exact"],
            )
        )
        if run["isolated"]:
            opened = sum(run["opened_by_vllm"].values())
            text = f"{opened} bytes; refused when tried: {'yes' if run['refused'] else 'NO'}"
            found.append((f"{name}: vLLM to trainer, replies aside", text, opened == 0 and run["refused"]))
            refused = sum(run["refused_packets"].values())
            found.append((f"{name}: packets refused anywhere", str(refused), refused == 0))
        if run["shaped"] and run["store"] == "s3":
            for quantile, most_s in LAG_S.items():
                lag_s = run[f"lag_s_{quantile}"]
                found.append((f"{name}: lag {quantile}", f"{lag_s:.3f} s of {most_s:.2f} s", lag_s <= most_s))
            text = f"{run['ack_s_mean']:.3f} s of {TRAINER_WAITS_S:.1f} s"
            found.append((f"{name}: trainer waits, mean", text, run["ack_s_mean"] <= TRAINER_WAITS_S))
        if run["shaped"]:
            plain = runs.get(name.replace("-shaped", ""))
            if plain is not None:
                ratio = run["pause_ms_p50"] / plain["pause_ms_p50"]
                text = f"{run['pause_ms_p50']:.1f} to {plain['pause_ms_p50']:.1f} ms"
                found.append(
                    (f"{name}: pause p50 as unshaped", text, 1 / PAUSE_WITHIN <= ratio <= PAUSE_WITHIN)
                )
        if run["regions"] and run["far"]:
            ratio, count = run["far"]["ratio"], run["replicas"] - len(REPLICAS)
            text = f"{ratio:.3f} bytes per published byte, {count} replicas behind the relay"
            found.append((f"{name}: the long line carries each version once", text, ratio <= FAR_WITHIN))
        if "with_fleet" in run["upload"]:
            alone, fleet = (run["upload"][key]["ratio"] for key in ("alone", "with_fleet"))
            text = f"{fleet:.3f} bytes per byte of payload, {alone:.3f} with the two alone"
            found.append(
                (f"{name}: upload with {run['replicas']} replicas", text, fleet <= UPLOAD_WITHIN * alone)
            )
    return found


def table(run: dict[str, Any]) -> list[tuple[str, str]]:
    """A run's numbers as rows for people."""
    checked = "; ".join(
        f"{host} {', '.join(map(str, versions))}" for host, versions in run["bits_checked_at"].items()
    )
    committed = ", ".join(f"{host} {count}" for host, count in run["versions_committed"].items())
    rows = [
        ("versions published; commits", f"{run['versions_published']}; {committed}"),
        ("bits equal (memory, channel, trainer)", f"{'yes' if run['bit_exact'] else 'NO'}, at {checked}"),
        (
            "delta payload, mean",
            f"{run['payload_bytes_mean'] / 1e3:.1f} kB, {run['changed_fraction_mean']:.2%} changed",
        ),
        ("generation pause, p50 / p95", f"{run['pause_ms_p50']:.1f} / {run['pause_ms_p95']:.1f} ms"),
        ("lag, encoded to served, p50 / p95", f"{run['lag_s_p50']:.2f} / {run['lag_s_p95']:.2f} s"),
        (
            "encode; staging; trainer waited, mean",
            f"{run['encode_s_mean']:.3f}; {run['stage_s_p50']:.3f}; {run['ack_s_mean']:.2f} s",
        ),
        (f"reward, first / last {WINDOW} steps", f"{run['reward_first']:.3f} -> {run['reward_last']:.3f}"),
        (
            "round trip",
            f"{run['round_trip_ms']:.1f} ms{'' if run['shaped_by'] is None else ', by ' + run['shaped_by']}",
        ),
    ]
    for host, peers in run["bytes"].items():
        sent = ", ".join(f"{count / 1e6:.2f} MB to {peer}" for peer, count in peers.items())
        refused = f"; refused {run['refused_packets'][host]}, stray {run['stray_packets'][host]} packets"
        rows.append((f"sent by {host}", (sent or "nothing") + refused))
    for name, upload in run["upload"].items():
        rows.append(
            (
                f"upload, {name}",
                f"{upload['ratio']:.3f} bytes per byte of payload, {upload['versions']} versions",
            )
        )
    if run["far"]:
        rows.append(("bucket to fleet", f"{run['far']['ratio']:.3f} bytes per published byte"))
    rows.append(("wall time", f"{run['wall_s']:.0f} s"))
    return rows
